"""HPUStrategy as far as it comes without a driver, and what our collective engine uses of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

Child = Callable[..., Any]


def test_it_is_one_of_tensorflows_with_one_replica_a_process() -> None:
    import tensorflow as tf
    from habana_frameworks.tensorflow.distribute import HPUStrategy

    # The class behind MultiWorkerMirroredStrategy: what our engine calls is there, and is tested on CPUs.
    assert issubclass(HPUStrategy, tf.distribute.MultiWorkerMirroredStrategy.__mro__[1])
    assert {"run", "num_replicas_in_sync", "scope"} <= set(dir(HPUStrategy))
    parameters = inspect.signature(HPUStrategy).parameters.values()
    assert all(one.default is not one.empty for one in parameters)


def test_it_is_constructed_up_to_where_it_wants_a_device(child: Child) -> None:
    cluster = {"cluster": {"worker": ["localhost:24210"]}, "task": {"type": "worker", "index": 0}}
    code = "from habana_frameworks.tensorflow.distribute import HPUStrategy\nHPUStrategy()\nprint('constructed')"
    unloaded = child(f"import tensorflow\n{code}", TF_CONFIG=json.dumps(cluster))
    assert unloaded.returncode == 1
    assert "AttributeError" in unloaded.stderr  # the module has to be loaded first, as our engine does
    loaded = child(code, loaded=True, TF_CONFIG=json.dumps(cluster))
    assert loaded.returncode < 0
    assert "constructed" not in loaded.stdout
    assert "synapse" in loaded.stderr.lower()

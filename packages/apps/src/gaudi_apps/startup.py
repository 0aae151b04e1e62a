"""What all ranks must have in common before the first step: flags, code, device, precision and data."""

from __future__ import annotations

import hashlib
import platform
from importlib import util
from pathlib import Path
from typing import Any

from gaudi_apps.config_file import list_flags
from gaudi_apps.session import Session
from gaudi_apps.versions import find_version
from gaudi_distributed.agreement import require_agreement

OURS = ("gaudi_apps", "gaudi_datasets", "gaudi_distributed", "gaudi_models", "gaudi_ops")
OTHERS = ("tensorflow", "tensorflow-cpu", "tf-keras", "habana-tensorflow", "mxnet", "horovod", "numpy")
# Where a machine has its data, and how much of itself it gives; what is there is compared by content.
OF_A_RANK = frozenset(
    {
        *("task_index", "config", "debug", "recipe_cache"),
        *("data_dir", "jpeg_data_dir", "train_annotations", "train_images", "val_annotations", "val_images"),
        *("coco_root", "tfrecord_root", "max_cpus", "threads", "threadpool_size", "dali_workers"),
        *("num_parallel_calls", "dataset_parallel_calls"),
        *("intra_op_parallelism_threads", "inter_op_parallelism_threads", "datasets_num_private_threads"),
    }
)


def require_equal_start(session: Session, data: str = "") -> None:
    """Compare over the ranks what they are about to do.

    Args:
        session: of this rank.
        data: fingerprint of the training data.

    Raises:
        ConfigurationError: ranks differ; it names the first difference.
    """
    if session.communicator.size > 1:
        require_agreement(session.communicator, list_start_facts(session, data))


def list_start_facts(session: Session, data: str) -> dict[str, Any]:
    """JSON values by name that are equal where ranks may train together."""
    flags = {name: value for name, value in list_flags(session.app.config) if name not in OF_A_RANK}
    return {
        "configuration": flags,
        "data": data,
        "device": session.app.framework.list_devices(),
        "precision": session.precision.name,
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in OTHERS},
        "code": hash_code(),
    }


def hash_code() -> str:
    """SHA-256 of our packages as they are installed: a version does not tell of a file that somebody changed."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = util.find_spec(package)
        folder = Path(spec.origin if spec and spec.origin else package).parent
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()

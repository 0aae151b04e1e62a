"""The manifest for Kubernetes: what a cluster accepts, and what each flag sets in it.

Accepted is what Kubernetes' published schema and the definition of an MPIJob let pass, and rules that neither holds:
those of Kubernetes' validation (pkg/apis/core/validation/validation.go), by which the API server refuses more, and of
its kubelet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate.utils import all_versions

from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.schedulers import Mount, is_job_file, parse_mount, parse_size

Plan = Callable[..., str]
MPIJOB = ["--mpijob", "-", "--image", "registry/gaudi:1"]
SCHEMA = json.loads(Path(__file__).with_name("mpijob_schema.json").read_text())
# The first and the last release whose schema the validator has: Kubernetes 1.25 to 1.37 with kubernetes-validate 1.37.
RELEASES = (all_versions()[0], all_versions()[-1])
# Of a quantity: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]+)?")
_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}


def validate(job: Mapping[str, Any]) -> None:
    """Raise unless a cluster with the MPI operator accepts the job.

    Raises:
        jsonschema.ValidationError: the schema of Kubernetes, or the definition of an MPIJob.
        AssertionError: another rule of Kubernetes; names it.
    """
    jsonschema.validate(job, SCHEMA)
    for kind, replica in job["spec"]["mpiReplicaSpecs"].items():
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": kind.lower()}}
        for release in RELEASES:
            kubernetes_validate.validate(template | {"template": replica["template"]}, release, strict=True)
        faults = list(find_faults(replica["template"]["spec"]))
        assert faults == [], faults


def find_faults(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules that a pod's specification breaks."""
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    if len(volumes) < len(pod.get("volumes", [])):
        yield "volumes: names must be unique"
    for name, volume in volumes.items():
        if len(set(volume) - {"name"}) != 1:
            yield f"volume {name}: must have exactly one source"
    for container in pod["containers"]:
        limits = container.get("resources", {}).get("limits", {})
        yield from find_faults_of_limits(limits)
        mounts = container.get("volumeMounts", [])
        paths = [mount["mountPath"] for mount in mounts]
        if len(set(paths)) < len(paths) or any(":" in path for path in paths):
            yield "volumeMounts: paths must be unique, and have no colon"
        for mount in mounts:
            medium = volumes.get(mount["name"], {}).get("emptyDir", {}).get("medium", "")
            if mount["name"] not in volumes:
                yield f"volumeMounts: there is no volume {mount['name']}"
            if medium.startswith("HugePages") and "hugepages-2Mi" not in limits:
                yield "medium HugePages: requires a limit of huge pages"


def find_faults_of_limits(limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules that a container's limits break."""
    values = {name: parse_quantity(value) for name, value in limits.items()}
    for name, value in values.items():
        if value is None or value <= 0:
            yield f"{name}: {limits[name]!r} is no quantity"
        elif "/" in name and value % 1:
            yield f"{name}: extended resources must be integers"
    huge = values.get("hugepages-2Mi")
    if huge and huge % (2 << 20):
        yield "hugepages-2Mi: must be a multiple of the page size"
    if huge and not {"cpu", "memory"} & set(limits):
        yield "hugepages-2Mi: requires cpu or memory"


def parse_quantity(value: object) -> float | None:
    """Return the number of a quantity, None where it is none."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None or isinstance(value, bool):
        return None
    suffix = found[2] or ""
    return float(found[1]) * (_SUFFIXES[suffix] if suffix else 1)


def expand(word: str) -> str:
    """Return a word of a container's command as it runs where the container has no variables of its own.

    By https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/: $$ is a dollar, and
    $(NAME) stays as it is where there is no NAME.
    """
    return re.sub(r"\$\$", "$", word)


def make_job(plan: Plan, *flags: str, command: tuple[str, ...] = ("ssd_train",)) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(plan([*MPIJOB, *flags, *command]))
    return job


def container_of(job: Mapping[str, Any], replica: str) -> dict[str, Any]:
    (container,) = job["spec"]["mpiReplicaSpecs"][replica]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def sources_of(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the source of what the workers' pods see at each path."""
    pod = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    sources = {
        volume["name"]: {key: value for key, value in volume.items() if key != "name"} for volume in pod["volumes"]
    }
    return {mount["mountPath"]: sources[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}


GAUDIS = {"habana.ai/gaudi": 8, "memory": "408Gi", "hugepages-2Mi": "21120Mi"}


@pytest.mark.parametrize(
    ("flags", "workers", "slots", "limits"),
    [
        (["--np", "2"], 1, 2, None),
        (["--np", "4", "--num_workers_per_hls", "2"], 2, 2, None),
        (["--preset", "habana-16"], 2, 8, GAUDIS),
        (["--preset", "habana-8", "--job_hugepages", "95000Mi", "--job_memory", "409Gi", "--job_cpus", "95"], 1, 8,
         {"habana.ai/gaudi": 8, "cpu": "95", "memory": "409Gi", "hugepages-2Mi": "95000Mi"}),
        (["--num_workers_per_hls", "4", "--accelerator", "gpu"], 1, 4, {"nvidia.com/gpu": 4}),
        (["--np", "2", "--job_memory", "8Gi", "--job_cpus", "2"], 1, 2, {"cpu": "2", "memory": "8Gi"}),
        (["--np", "2", "--job_hugepages", "4Mi", "--job_cpus", "2"], 1, 2, {"cpu": "2", "hugepages-2Mi": "4Mi"}),
    ],
)  # fmt: skip
def test_a_cluster_accepts_the_job(
    plan: Plan, flags: list[str], workers: int, slots: int, limits: dict[str, int] | None
) -> None:
    job = make_job(plan, *flags)
    validate(job)
    assert (job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"], job["spec"]["slotsPerWorker"]) == (workers, slots)
    assert container_of(job, "Worker").get("resources", {}).get("limits") == limits
    own = {"cpu": "1", "memory": "2Gi"}
    expected = {name: limit for name, limit in own.items() if name in (limits or {})}
    assert container_of(job, "Launcher").get("resources", {}).get("limits", {}) == expected


@pytest.mark.costly
def test_a_job_that_is_none_does_not_pass(plan: Plan) -> None:
    """Each rule can fail."""
    good = make_job(plan, "--np", "2", "--job_hugepages", "4Mi", "--job_memory", "1Gi", "--mount", "coco:/data")
    changes: list[Callable[[dict[str, Any], dict[str, Any]], object]] = [
        lambda spec, pod: spec.update(slots=2),
        lambda spec, pod: spec.update(launcherCreationPolicy="Later"),
        lambda spec, pod: spec["mpiReplicaSpecs"].pop("Launcher"),
        lambda spec, pod: pod["containers"][0].update(volumes=[]),
        lambda spec, pod: pod["containers"][0]["volumeMounts"][0].pop("mountPath"),
        lambda spec, pod: pod["volumes"][0]["emptyDir"].update(sizeLimit=[]),
        lambda spec, pod: pod["volumes"][0].update(emptyDir={"medium": "Memory", "size": "1Gi"}),
        lambda spec, pod: pod["volumes"].pop(),
        lambda spec, pod: pod["volumes"].append(pod["volumes"][0]),
        lambda spec, pod: pod["containers"][0]["volumeMounts"].append({"name": "mount-0", "mountPath": "/data"}),
        lambda spec, pod: pod["containers"][0]["resources"]["limits"].update({"hugepages-2Mi": "3Mi"}),
        lambda spec, pod: pod["containers"][0]["resources"]["limits"].pop("memory"),
        lambda spec, pod: pod["containers"][0]["resources"]["limits"].pop("hugepages-2Mi"),
        lambda spec, pod: pod["containers"][0]["resources"]["limits"].update(memory="1 Gi"),
    ]
    validate(good)
    for change in changes:
        job = json.loads(json.dumps(good))
        change(job["spec"], job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"])
        with pytest.raises((jsonschema.ValidationError, AssertionError)):
            validate(job)


def test_volumes(plan: Plan) -> None:
    mounts = ["--mount", "coco:/data:ro", "--mount", "/mnt/results:/results", "--mount", "scratch.a:/tmp/x:rw"]
    job = make_job(plan, "--np", "4", *mounts)
    validate(job)
    assert sources_of(job) == {
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
        "/data": {"persistentVolumeClaim": {"claimName": "coco", "readOnly": True}},
        "/results": {"hostPath": {"path": "/mnt/results", "type": "Directory"}},
        "/tmp/x": {"persistentVolumeClaim": {"claimName": "scratch.a"}},
    }
    read_only = [mount["mountPath"] for mount in container_of(job, "Worker")["volumeMounts"] if mount.get("readOnly")]
    assert read_only == ["/data"]
    assert "--mount" not in container_of(job, "Launcher")["command"]


def test_huge_pages_and_shared_memory(plan: Plan) -> None:
    job = make_job(plan, "--preset", "habana-8", "--job_shm", "64Gi")
    validate(job)
    assert sources_of(job) == {
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        "/hugepages-2Mi": {"emptyDir": {"medium": "HugePages-2Mi"}},
    }
    assert container_of(job, "Worker")["securityContext"]["capabilities"]["add"] == ["SYS_NICE"]


@pytest.mark.parametrize(
    ("flags", "folder", "port", "command"),
    [
        ([], "/home/gaudi/.ssh", 2222, ["/usr/sbin/sshd", "-De", "-f", "/etc/gaudi/sshd_config", "-p", "2222"]),
        (["--job_ssh", "/root/.ssh"], "/root/.ssh", 22, None),
        (["--job_ssh", "/root/.ssh", "--ssh_port", "3022"], "/root/.ssh", 3022, None),
    ],
)
def test_the_launcher_waits_for_the_workers_sshd(
    plan: Plan, flags: list[str], folder: str, port: int, command: list[str] | None
) -> None:
    job = make_job(plan, "--np", "2", *flags)
    validate(job)
    worker = container_of(job, "Worker")
    assert job["spec"]["sshAuthMountPath"] == folder
    assert job["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert worker["readinessProbe"]["tcpSocket"]["port"] == port
    assert worker.get("command") == command
    launcher = container_of(job, "Launcher")["command"]
    assert launcher == ["gaudi-run", "--cores_per_rank", "0", "--ssh_port", str(port), "--np", "2", "ssd_train"]


def test_arguments_are_text_whatever_they_look_like(plan: Plan) -> None:
    arguments = ("ssd_train", "yes", "1", "null", "- a: b", "$(HOME)", "$$(KUBERNETES_PORT)", "$", "a\nb")
    job = make_job(plan, "--np", "2", "--job_name", "job", command=arguments)
    validate(job)
    words = container_of(job, "Launcher")["command"][-len(arguments) :]
    assert [expand(word) for word in words] == list(arguments)
    assert [word for word in words if re.search(r"(?<!\$)(\$\$)*\$\(", word)] == []


def test_the_launcher_has_the_variables_that_it_passes_on(plan: Plan) -> None:
    job: dict[str, Any] = json.loads(plan([*MPIJOB, "--np", "2", "--forward", "NAME", "x"], {"NAME": "$(HOME) a"}))
    validate(job)
    launcher = container_of(job, "Launcher")
    assert launcher["env"] == [{"name": "NAME", "value": "$$(HOME) a"}]
    assert parse_flags(launcher["command"][1:]).forward == ("NAME",)


def test_the_command_is_one_that_gaudi_run_takes(plan: Plan) -> None:
    flags = ["--np", "2", "--mount", "a:/b", "--job_memory", "8Gi", "--job_ssh", "/root/.ssh", "--tag_output"]
    options = parse_flags(container_of(make_job(plan, *flags), "Launcher")["command"][1:])
    assert (options.np, options.tag_output, options.command) == (2, True, ("ssd_train",))
    assert not is_job_file(options)


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("coco-2017:/data", ({"persistentVolumeClaim": {"claimName": "coco-2017"}}, {"mountPath": "/data"})),
        (
            "/a b:/c d:ro",
            ({"hostPath": {"path": "/a b", "type": "Directory"}}, {"mountPath": "/c d", "readOnly": True}),
        ),
        ("a.b:/data:rw", ({"persistentVolumeClaim": {"claimName": "a.b"}}, {"mountPath": "/data"})),
    ],
)
def test_a_volume_is_a_claim_or_a_folder(text: str, mount: Mount) -> None:
    assert parse_mount(text) == mount


@pytest.mark.parametrize(
    "text",
    ["coco", "coco:data", "Coco:/data", "-a:/b", "/a/../etc:/b", "/a:/b:rx", "a:/b:ro:ro", "/a:/b\n", "a,b:/c", ":/a"],
)
def test_another_volume_is_refused(text: str) -> None:
    with pytest.raises(FlagError, match="--mount"):
        parse_mount(text)


@pytest.mark.parametrize(
    ("text", "size"), [(None, 0), ("1Ki", 1024), ("95000Mi", 95000 << 20), ("64Gi", 64 << 30), ("2Ti", 2 << 40)]
)
def test_sizes(text: str | None, size: int) -> None:
    assert parse_size("--job_shm", text) == size
    assert text is None or parse_quantity(text) == size


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--job_shm", "64"], "--job_shm '64'"),
        (["--job_shm", "1.5Gi"], "--job_shm '1.5Gi'"),
        (["--job_memory", "0Gi"], "--job_memory '0Gi'"),
        (["--job_memory", "8Gi", "--job_shm", "9Gi"], "--job_shm 9Gi"),
        (["--job_hugepages", "3Mi", "--job_memory", "8Gi"], "--job_hugepages 3Mi"),
        (["--job_hugepages", "4Mi"], "--job_memory"),
        (["--job_cpus", "0"], "--job_cpus"),
        (["--job_ssh", "ssh"], "--job_ssh 'ssh'"),
        (["--mount", "a:/dev/shm"], "/dev/shm"),
        (["--mount", "a:/dev/shm/"], "/dev/shm"),
        (["--mount", "a:/b", "--mount", "/c:/b"], "/b"),
        (["--mount", "a:/home/gaudi/.ssh"], "/home/gaudi/.ssh"),
        (["--container", "docker"], "--container"),
        (["--workdir", "/work"], "--workdir"),
    ],
)
def test_what_is_refused(plan: Plan, flags: list[str], said: str) -> None:
    with pytest.raises(FlagError, match=said):
        make_job(plan, "--np", "2", *flags)


def test_flags_of_pods_need_a_job(plan: Plan) -> None:
    with pytest.raises(FlagError, match="go with --mpijob"):
        plan(["--np", "2", "--job_memory", "8Gi", "ssd_train"])

"""Which objects start the hosts of a Kubernetes domain?

Hosts that hold as many devices of one kind are one PyTorchJob (kubeflow.org/v1): a Master on the
first host, Workers on the others. A Worker may run on any of its group's nodes, never two on one;
whatever its number, it finds its agents by the name of its node (`spec.nodeName`), so that the
plan's placement does not depend on Kubeflow's numbering. Unlike hosts are several PyTorchJobs. For
clusters without Kubeflow the same pods are emitted as Jobs (batch/v1).

Pods use the host's network: addresses and ports are those of the nodes, as other domains see them.
The emitted folder comes as a ConfigMap.

Of PyTorchJob: kubeflow/training-operator, release-1.9: pkg/webhooks/pytorch (names are labels of
RFC 1035, one Master, a container named pytorch), pkg/controller.v1/pytorch/envvar.go (variables
PET_*, which start-here.sh removes). Pods are pinned by `metadata.name` of the node, as DaemonSets
pin theirs; kubernetes.io/hostname may be another name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from hetplan.cluster.launch_domains import LaunchDomain, label_fault, reference_fault, resource_of
from hetplan.emitters.quoting import yaml_text
from hetplan.emitters.schedulers.tables import Tables, uniform_groups, used_devices
from hetplan.emitters.sheet import Host, LaunchSheet
from hetplan.emitters.trainer_launch import EmitOptions, EmittedFile
from hetplan.errors import Fault, InputError

FOLDER_IN_POD = "/hetplan"
PYTORCH_JOBS, JOBS = "kubernetes-{}.yaml", "kubernetes-{}-jobs.yaml"
CHECKS = "kubernetes-{}-check.yaml"
_CHECK = "check.py"
MAX_CONFIG_BYTES = 1_000_000
"""Of the 1 MiB that the objects of Kubernetes may have (ConfigMap's documentation)."""
_GRACE_SECONDS = 60
_LABEL = "hetplan-job"

Value = dict[str, Any]
"""An object of Kubernetes, as YAML has it."""


def kubernetes_texts(
    sheet: LaunchSheet,
    domain: LaunchDomain,
    tables: Tables,
    files: Sequence[EmittedFile],
    options: EmitOptions,
    checks: Sequence[EmittedFile] = (),
) -> tuple[EmittedFile, ...]:
    """The manifests of a domain: as PyTorchJobs, as plain Jobs, and as Jobs that only check.

    `files` are those of the folder that pods need; `checks` what check.py needs beside them. An
    InputError lists what cannot be.
    """
    groups = uniform_groups(sheet, domain.name)
    faults = [fault for hosts in groups for fault in _host_faults(domain, hosts)]
    size = _size(files)
    if size > MAX_CONFIG_BYTES:
        message = (
            f"the folder's files have {size:,} bytes, a ConfigMap of Kubernetes holds "
            f"{MAX_CONFIG_BYTES:,}: give domain {domain.name} fewer hosts"
        )
        faults.append(Fault(field="inputs.cluster.launch_domains", message=message))
    if faults:
        raise InputError(*dict.fromkeys(faults))
    name = job_label(domain, tables)
    used = used_devices(sheet)
    config = _config_map(domain, name, files)
    pods = [
        (hosts, _pod(domain, name, hosts, len(used[hosts[0].name]), files, options))
        for hosts in groups
    ]
    training = [
        _pytorch_job(domain, name, number, hosts, pod) for number, (hosts, pod) in enumerate(pods)
    ]
    plain = [_job(domain, name, number, hosts, pod) for number, (hosts, pod) in enumerate(pods)]
    return (
        EmittedFile(path=PYTORCH_JOBS.format(domain.name), text=yaml_text(config, *training)),
        EmittedFile(path=JOBS.format(domain.name), text=yaml_text(config, *plain)),
        *_checking(domain, f"{name}-check", groups, used, (*files, *checks), options),
    )


def _size(files: Sequence[EmittedFile]) -> int:
    return sum(len(file.text.encode()) for file in files)


def _checking(
    domain: LaunchDomain,
    name: str,
    groups: Sequence[tuple[Host, ...]],
    used: dict[str, tuple[int, ...]],
    files: Sequence[EmittedFile],
    options: EmitOptions,
) -> Iterator[EmittedFile]:
    """Jobs that check the hosts; none where a ConfigMap does not hold what they need."""
    if _size(files) > MAX_CONFIG_BYTES or not any(file.path == _CHECK for file in files):
        return
    jobs = []
    for number, hosts in enumerate(groups):
        pod = _pod(domain, name, hosts, len(used[hosts[0].name]), files, options)
        pod["containers"][0]["command"].append("--check")
        jobs.append(_job(domain, name, number, hosts, pod))
    text = yaml_text(_config_map(domain, name, files), *jobs)
    yield EmittedFile(path=CHECKS.format(domain.name), text=text)


def job_label(domain: LaunchDomain, tables: Tables) -> str:
    """Name of a domain's objects, and the value of the label of all its pods."""
    mark = hashlib.sha256(f"{tables.token} {domain.name}".encode()).hexdigest()[:6]
    return f"hetplan-{domain.name[:20].rstrip('-')}-{mark}"


def pod_count(sheet: LaunchSheet, domain: LaunchDomain) -> int:
    """Pods of a domain: one for each host."""
    return sum(len(hosts) for hosts in uniform_groups(sheet, domain.name))


def _host_faults(domain: LaunchDomain, hosts: Sequence[Host]) -> list[Fault]:
    """Names that no node has; an image or a resource that nobody gave."""
    found = []
    for host in hosts:
        # Names of nodes are labels of RFC 1123 with dots between them.
        wrong = [label for label in host.name.split(".") if label_fault(label)]
        if wrong:
            message = f"{host.name} is no name of a node of Kubernetes: a-z, 0-9, '-' and '.'"
            found.append(Fault(field="inputs.cluster", message=message))
    kind = hosts[0].device_kind
    message = reference_fault(domain.image_of(kind))
    if message:
        place = "inputs.cluster.launch_domains"
        text = f"domain {domain.name}: image for {kind}: {message}"
        found.append(Fault(field=place, message=text))
    if not _resource(domain, hosts[0]):
        message = f"domain {domain.name}: no resource for devices of kind {kind}; add it to kinds"
        found.append(Fault(field="inputs.cluster.launch_domains", message=message))
    return found


def _resource(domain: LaunchDomain, host: Host) -> str:
    return resource_of(domain, host.device_kind, host.vendor)


def _metadata(domain: LaunchDomain, name: str, label: str) -> Value:
    metadata: Value = {"name": name}
    if domain.namespace:
        metadata["namespace"] = domain.namespace
    return metadata | {"labels": {_LABEL: label}}


def _config_map(domain: LaunchDomain, name: str, files: Sequence[EmittedFile]) -> Value:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(domain, name, name),
        "data": {_key(file.path): file.text for file in files},
    }


def _key(path: str) -> str:
    """A key of a ConfigMap: no slashes."""
    return path.replace("/", "..")


def _pod(
    domain: LaunchDomain,
    name: str,
    hosts: Sequence[Host],
    devices: int,
    files: Sequence[EmittedFile],
    options: EmitOptions,
) -> Value:
    """The pod of each of some like hosts, without the choice among them."""
    environment: list[Value] = [
        {"name": "HETPLAN_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "HETPLAN_LOGS", "value": "-"},  # the pod's own log: the folder cannot be written
    ]
    if options.trainer_folder:
        environment.append({"name": "TRAINER_FOLDER", "value": options.trainer_folder})
    resource = _resource(domain, hosts[0])
    container: Value = {
        "name": "pytorch",
        "image": domain.image_of(hosts[0].device_kind),
        "command": ["bash", f"{FOLDER_IN_POD}/start-here.sh"],
        "env": environment,
        "resources": {"limits": {resource: devices}, "requests": {resource: devices}},
        "volumeMounts": [
            {"name": "folder", "mountPath": FOLDER_IN_POD},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if domain.fabric_devices:
        # RDMA registers memory, which a container's limit on locked memory would refuse.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    config: Value = {"name": name}
    if any("/" in file.path for file in files):
        config["items"] = [{"key": _key(file.path), "path": file.path} for file in files]
    pod: Value = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "folder", "configMap": config},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if "/" in resource:
        # Nodes with devices are often kept free of other pods by a taint of the resource's name.
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    return pod


def _template(name: str, hosts: Sequence[Host], pod: Value) -> Value:
    """The pod on any of these hosts, and never two of the job's on one."""
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [host.name]}]}
        for host in hosts
    ]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": {_LABEL: name}},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        },
    }
    return {"metadata": {"labels": {_LABEL: name}}, "spec": pod | {"affinity": affinity}}


def _pytorch_job(
    domain: LaunchDomain, name: str, number: int, hosts: Sequence[Host], pod: Value
) -> Value:
    replicas: Value = {
        "Master": {
            "replicas": 1,
            "restartPolicy": "Never",
            "template": _template(name, hosts[:1], pod),
        }
    }
    if len(hosts) > 1:
        replicas["Worker"] = {
            "replicas": len(hosts) - 1,
            "restartPolicy": "Never",
            "template": _template(name, hosts[1:], pod),
        }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(domain, f"{name}-{number}", name),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 0},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _job(domain: LaunchDomain, name: str, number: int, hosts: Sequence[Host], pod: Value) -> Value:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(domain, f"{name}-{number}", name),
        "spec": {
            "completions": len(hosts),
            "parallelism": len(hosts),
            # A pod started again alone would wait at the barrier for hosts that have ended.
            "backoffLimit": 0,
            "template": _template(name, hosts, pod),
        },
    }

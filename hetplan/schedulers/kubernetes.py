"""launch.yaml: a JobSet of Kubernetes that runs launch.sh in one pod on every host.

Hosts that hold as many devices of one kind are one replicated job. A pod may run on any host of its
job, never two on one; it finds its ranks by the name of its node (`spec.nodeName`), so that the
placement does not depend on Kubernetes' numbering. When one pod fails, the JobSet ends the others
(jobset.x-k8s.io/v1alpha2: failurePolicy). Pods use the host's network: addresses and ports are
those of the nodes. The emitted folder comes as a ConfigMap, which one `kubectl create` makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hetplan.cluster.launch_domains import LaunchDomain, Named, Scheduler, resource_of
from hetplan.errors import Fault, InputError
from hetplan.schedulers.launch import EmissionOptions, EmittedFile, TrainerLaunch
from hetplan.schedulers.quoting import yaml_text
from hetplan.schedulers.rank_layout import Host, RankLayout, uniform_groups, used_devices
from hetplan.schedulers.torchrun import LAUNCH_FILE
from hetplan.schedulers.torchrun import launch_files as torchrun_files

MANIFEST_FILE = "launch.yaml"
FOLDER_IN_POD = "/hetplan"
_GRACE_SECONDS = 60
_LABEL = "hetplan-job"
_DOMAINS = "inputs.cluster.launch_domains"

Value = dict[str, Any]
"""An object of Kubernetes, as YAML has it."""


def launch_files(
    ranks: RankLayout, launch: TrainerLaunch, options: EmissionOptions
) -> tuple[EmittedFile, ...]:
    """launch.sh and the JobSets; an InputError where a domain cannot start its hosts."""
    domains = _domains(ranks)
    if not domains:
        raise InputError(
            "--scheduler kubernetes: no host of the plan is in a launch domain with scheduler: "
            "kubernetes; name the domain in the cluster file, or emit for torchrun"
        )
    groups = {domain.name: _groups(ranks, domain) for domain in domains}
    faults = [fault for domain in domains for group in groups[domain.name] for fault in
              _host_faults(domain, group)]  # fmt: skip
    if faults:
        raise InputError(*dict.fromkeys(faults))
    used = used_devices(ranks)
    documents = [
        _job_set(domain, job_name(ranks, launch), groups[domain.name], used, launch, options)
        for domain in domains
    ]
    return (
        *torchrun_files(ranks, launch, options),
        EmittedFile(path=MANIFEST_FILE, text=yaml_text(*documents)),
    )


def start_lines(ranks: RankLayout, launch: TrainerLaunch) -> list[str]:
    """The ConfigMap and the JobSet, with kubectl."""
    name = job_name(ranks, launch)
    files = (LAUNCH_FILE, *(file.path for file in launch.files))
    given = " ".join(f"--from-file={path}" for path in files)
    lines = ["From this folder, where the controller of JobSet is installed:", ""]
    for domain in _domains(ranks):
        space = f" --namespace {domain.namespace}" if domain.namespace else ""
        lines.append(f"    kubectl{space} create configmap {name} {given}")
    lines += [
        f"    kubectl create -f {MANIFEST_FILE}",
        "",
        f"`kubectl logs -l {_LABEL}={name} --prefix` shows what the ranks say; "
        f"`kubectl delete -f {MANIFEST_FILE}` ends the job. Pods are bound to nodes by the label "
        "kubernetes.io/hostname: change launch.yaml where it is not the node's name.",
    ]
    others = sum(host.domain.scheduler is not Scheduler.KUBERNETES for host in ranks.hosts)
    if others:
        lines.append(
            f"The other {others} hosts are in no Kubernetes domain: run `bash {LAUNCH_FILE}` "
            "there, or emit once more for their scheduler. All meet at the rendezvous."
        )
    return lines


def job_name(ranks: RankLayout, launch: TrainerLaunch) -> str:
    """Name of the job's objects, and the value of the label of its pods."""
    whole = repr((ranks.agents, launch.program, launch.arguments))
    return f"hetplan-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _domains(ranks: RankLayout) -> list[LaunchDomain]:
    return [each for each in ranks.domains if each.scheduler is Scheduler.KUBERNETES]


def _groups(ranks: RankLayout, domain: LaunchDomain) -> list[list[Host]]:
    hosts = [host for host in ranks.hosts if host.domain == domain]
    return uniform_groups(hosts, used_devices(ranks))


def _host_faults(domain: LaunchDomain, hosts: Sequence[Host]) -> list[Fault]:
    """Names that no node has; an image or a resource that nobody gave."""
    faults = []
    for host in hosts:
        # Names of nodes are labels of RFC 1123 with dots between them.
        if any(Named.LABEL.fault(label) for label in host.name.split(".")):
            message = f"{host.name} is no name of a node of Kubernetes: a-z, 0-9, '-' and '.'"
            faults.append(Fault(field="inputs.cluster", message=message))
    kind = hosts[0].device_kind
    message = Named.REFERENCE.fault(domain.image_of(kind))
    if message:
        text = f"domain {domain.name}: image for {kind}: {message}"
        faults.append(Fault(field=_DOMAINS, message=text))
    if not resource_of(domain, kind, hosts[0].vendor):
        text = f"domain {domain.name}: no resource for devices of kind {kind}; add it to kinds"
        faults.append(Fault(field=_DOMAINS, message=text))
    return faults


def _job_set(
    domain: LaunchDomain,
    name: str,
    groups: Sequence[Sequence[Host]],
    used: dict[str, tuple[int, ...]],
    launch: TrainerLaunch,
    options: EmissionOptions,
) -> Value:
    metadata: Value = {"name": f"{name}-{domain.name[:20].rstrip('-')}"}
    if domain.namespace:
        metadata["namespace"] = domain.namespace
    jobs = []
    for number, hosts in enumerate(groups):
        pod = _pod(domain, name, hosts, len(used[hosts[0].name]), launch, options)
        template = {"metadata": {"labels": {_LABEL: name}}, "spec": pod}
        # A pod started again alone would wait for hosts that have ended.
        job = {
            "parallelism": len(hosts),
            "completions": len(hosts),
            "backoffLimit": 0,
            "template": template,
        }
        jobs.append({"name": f"hosts-{number}", "template": {"spec": job}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs},
    }


def _pod(
    domain: LaunchDomain,
    name: str,
    hosts: Sequence[Host],
    devices: int,
    launch: TrainerLaunch,
    options: EmissionOptions,
) -> Value:
    """The pod of each of some like hosts."""
    environment: list[Value] = [
        {"name": "HETPLAN_HOST", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    ]
    if options.trainer_folder:
        environment.append({"name": "TRAINER_FOLDER", "value": options.trainer_folder})
    resource = resource_of(domain, hosts[0].device_kind, hosts[0].vendor)
    container: Value = {
        "name": "pytorch",
        "image": domain.image_of(hosts[0].device_kind),
        "command": ["bash", f"{FOLDER_IN_POD}/{LAUNCH_FILE}"],
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
    pod: Value = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "affinity": _affinity(name, hosts),
        "containers": [container],
        "volumes": [
            {"name": "folder", "configMap": {"name": name}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if "/" in resource:
        # Nodes with devices are often kept free of other pods by a taint of the resource's name.
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    return pod


def _affinity(name: str, hosts: Sequence[Host]) -> Value:
    """The pod on any of these hosts, and never two of the job's on one."""
    rule = {"key": "kubernetes.io/hostname", "operator": "In", "values": [h.name for h in hosts]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    apart = {
        "labelSelector": {"matchLabels": {_LABEL: name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    wanted = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"nodeAffinity": {wanted: terms}, "podAntiAffinity": {wanted: [apart]}}

"""A JobSet for Kubernetes: one pod a node, found by name through a headless service, on one volume.

Why a JobSet and not a PyTorchJob: a Job's podFailurePolicy can say that exit code 75 is no failure; a PyTorchJob
(Training Operator v1) counts 1 to 127 as final, and has no such rule. Kubeflow's Trainer v2 makes JobSets as well.
Sources: jobset.x-k8s.io/v1alpha2 (JobSet 0.10), batch/v1 Job ("Pod failure policy"). Written as text, so that it can say
why; strings are quoted as JSON, which YAML reads.
"""

from __future__ import annotations

import json
import re

from bessemer.errors import InputError
from bessemer.recipe import Recipe, dump


def manifest(recipe: Recipe) -> str:
    """The ConfigMap with the recipe and the JobSet. Raises InputError when [cluster] lacks the image or the claim."""
    cluster, layout = recipe.cluster, recipe.parallel
    for key, what in (("image", "the container image with bessemer in it"), ("claim", "the volume of the run folder")):
        if getattr(cluster, key) is None:
            raise InputError(
                f"cluster.{key}: missing; kubernetes needs {what}, for example cluster.{key} = {EXAMPLE[key]}"
            )
    name, each = _name(recipe), layout.world // cluster.nodes
    fewest = cluster.min_nodes or cluster.nodes
    nodes = str(cluster.nodes) if fewest == cluster.nodes else f"{fewest}:{cluster.nodes}"
    command = [
        "bessemer", "train", "/etc/bessemer/recipe.toml", "--nnodes", nodes, "--nproc-per-node", str(each),
        "--rdzv-endpoint", f"{name}-node-0-0.{name}:{cluster.port}", "--rdzv-id", f"{name}.$(RESTART_ATTEMPT)",
    ]  # fmt: skip
    # Without elastic, one lost pod is the end of this Job, and the JobSet makes all of them anew.
    pods_again = 0 if fewest == cluster.nodes else layout.restarts * cluster.nodes
    return f"""# {recipe.run.name}: {layout.world} processes on {cluster.nodes} nodes. Written by `bessemer launch`.
# Start it:  kubectl apply -f jobset.yaml      (needs the JobSet controller: https://jobset.sigs.k8s.io)
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}{_namespace(recipe)}
data:
  recipe.toml: |
{_indented(dump(recipe), 4)}
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}{_namespace(recipe)}
spec:
  network:
    enableDNSHostnames: true  # a headless service: pod N is {name}-node-0-N.{name}
    subdomain: {name}
    publishNotReadyAddresses: true  # the nodes meet before any of them is ready
  failurePolicy:
    maxRestarts: {layout.restarts}
    rules:
      - name: badInput  # exit code 2, by the rule below: another attempt would meet it again
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          parallelism: {cluster.nodes}
          completions: {cluster.nodes}
          backoffLimit: {pods_again}
          podReplacementPolicy: Failed  # a pod that still saves is not replaced before it has ended
          podFailurePolicy:
            rules:
              - action: Ignore  # drained, preempted: not the training's fault
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: Ignore  # stopped on request with everything saved: started again, without counting
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [75]
              - action: FailJob  # wrong input
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [2]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {cluster.save_seconds}  # to finish the step in hand and save
              containers:
                - name: train
                  image: {json.dumps(cluster.image)}
                  command: {json.dumps(command)}
                  workingDir: {json.dumps(cluster.mount)}
                  env:
                    - name: PYTHONUNBUFFERED  # output appears as it is written
                      value: "1"
                    - name: PYTHONFAULTHANDLER  # a crash in native code leaves the Python stack
                      value: "1"
                    - name: NCCL_DEBUG
                      value: "WARN"
                    - name: TORCH_NCCL_ASYNC_ERROR_HANDLING  # a lost neighbour ends a process instead of leaving it waiting
                      value: "1"
                    - name: POD_IP  # the address at which the other nodes reach this one
                      valueFrom:
                        fieldRef:
                          fieldPath: status.podIP
                    - name: RESTART_ATTEMPT  # pods of one attempt do not meet those of the last
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.labels['jobset.sigs.k8s.io/restart-attempt']
                  ports:
                    - containerPort: {cluster.port}
{_resources(recipe, each)}
                  volumeMounts:
                    - name: data
                      mountPath: {json.dumps(cluster.mount)}
                    - name: recipe
                      mountPath: /etc/bessemer
                      readOnly: true
                    - name: shared-memory
                      mountPath: /dev/shm
              volumes:
                - name: data  # every node must see the same run folder
                  persistentVolumeClaim:
                    claimName: {cluster.claim}
                - name: recipe
                  configMap:
                    name: {name}
                - name: shared-memory  # a container's own 64 MB are too few for NCCL
                  emptyDir:
                    medium: Memory
                    sizeLimit: {cluster.shared_memory}
"""


MEMORY_OF_A_PROCESS = (
    32  # GiB: torch and CUDA take 4, and a checkpoint that is written asynchronously a copy of the state
)
EXAMPLE = {"image": '"registry.example.org/bessemer:1"', "claim": '"runs"'}


def _name(recipe: Recipe) -> str:
    """The run's name as a DNS label; with the suffixes of pods it must stay under 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")[:40].strip("-") or "run"


def _namespace(recipe: Recipe) -> str:
    return f"\n  namespace: {recipe.cluster.namespace}" if recipe.cluster.namespace else ""


def _resources(recipe: Recipe, each: int) -> str:
    """Limits are requests too; what is only requested may be exceeded. Without requests a pod is the first to be evicted."""
    cluster, limits = recipe.cluster, {}
    requests = {"cpu": str(each * cluster.cpus_per_process)}
    if recipe.train.device != "cpu":
        limits["nvidia.com/gpu"] = str(each)
    if cluster.memory is not None:
        limits["memory"] = cluster.memory
    else:
        requests["memory"] = f"{each * MEMORY_OF_A_PROCESS}Gi"
    lines = [" " * 18 + "resources:"]
    for name, values in (("requests", requests), ("limits", limits)):
        if values:
            lines.append(f"{' ' * 20}{name}:")
            lines += [f"{' ' * 22}{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines)


def _indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line if line else "" for line in text.rstrip().splitlines())

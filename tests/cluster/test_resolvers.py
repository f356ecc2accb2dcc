"""Who a process is, read from environments such as launchers make them."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

import ndistribute as nd
from ndistribute.cluster import ClusterSpec, resolve
from ndistribute.cluster import MPIClusterResolver as Mpi
from ndistribute.cluster import SimpleClusterResolver as Simple
from ndistribute.cluster import SlurmClusterResolver as Slurm
from ndistribute.cluster import TFConfigClusterResolver as TFConfig
from ndistribute.cluster import TorchrunClusterResolver as Torchrun

CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}


def tf_config(cluster=CLUSTER, job="worker", index=0, **more):
    config = {"cluster": cluster, "task": {"type": job, "index": index}, **more}
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.parametrize(
    ("job", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, None), ("evaluator", 0, None)],
)
def test_the_chief_comes_first_and_servers_have_no_rank(job, index, rank):
    me = TFConfig(environ=tf_config(job=job, index=index, environment="cloud"))
    assert (me.task_type, me.task_id, me.environment) == (job, index, "cloud")
    assert me.cluster_spec() == ClusterSpec(CLUSTER)
    assert me.worker_addresses == ("c:1", "a:1", "b:1")
    assert (me.worker_index, me.num_workers, me.bootstrap) == (rank, 3, "tcp")
    assert me.is_chief is (job == "chief")
    assert me.master() == CLUSTER[job][index]
    assert me.master("worker", 1) == "b:1"


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        # Without a chief, worker 0 is the chief.
        (tf_config({"worker": ["a:1", "b:1"]}), (), (0, 2, True, "a:1")),
        (tf_config({"worker": ["a:1", "b:1"]}, index=1), (), (1, 2, False, "b:1")),
        # An evaluator need not be listed.
        (tf_config({"worker": ["a:1"]}, "evaluator"), (), (None, 1, False, "")),
        # Only some tasks may be known, and a template may quote numbers.
        (tf_config({"worker": {"1": "b:1", "3": "d:1"}}, index="3"), (), (1, 2, False, "d:1")),
        # The program gives the task.
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, ("worker", 1), (2, 3, False, "b:1")),
    ],
)
def test_tf_config_names_the_task_of_a_process(environ, arguments, expected):
    me = TFConfig(*arguments, environ=environ)
    assert (me.worker_index, me.num_workers, me.is_chief, me.master()) == expected


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": " "}, {"TF_CONFIG": "{}"}])
def test_an_empty_variable_is_a_process_that_works_alone(environ):
    me = TFConfig(environ=environ)
    assert (me.task_type, me.task_id, me.master(), me.is_chief) == (None, None, "", True)
    assert (me.worker_addresses, me.worker_index, me.num_workers) == ((), 0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: Expecting"),
        ('{"cluster": 3}', "'cluster' is int, not an object"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "the task of this process is unknown"),
        (tf_config({"worker": "a:1"}), "'worker' must be a list"),
        (tf_config({"worker": {"x": "a:1"}}), "'x', expected an integer"),
        (tf_config({"worker": ["a"]}), "task 0 of 'worker' has the address 'a'"),
        (tf_config({"worker": ["a:99999"]}), "'a:99999', which is not HOST:PORT"),
        (tf_config({"worker": ["a:1"]}, 1), "'type' in 'task' is 1"),
        (tf_config({"worker": ["a:1"]}, index=1.5), "'index' in 'task' is 1.5"),
        (tf_config({"worker": ["a:1"]}, index=1), "1 task, numbered from 0, but this process has"),
        (tf_config({"worker": ["a:1"]}, "ps"), "'ps' is none of 'worker'"),
        (
            tf_config({"wroker": ["a:1"]}, "wroker"),
            "an unknown job 'wroker'; the known jobs are 'chief', 'worker', 'ps', 'evaluator'",
        ),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "at most one 'chief'"),
        ('{"task": {"type": "worker", "index": 0}}', "a 'task', but no 'cluster'"),
        ('{"clusters": {}, "task": {"type": "worker"}}', "a 'task', but no 'cluster'"),
        (tf_config({}, index=1), "a 'task', but no 'cluster'"),
    ],
)
def test_what_is_wrong_in_tf_config_is_named(text, message):
    environ = {"TF_CONFIG": text} if isinstance(text, str) else text
    with pytest.raises(ValueError, match="TF_CONFIG is malformed") as caught:
        TFConfig(environ=environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "2", "PMI_SIZE": "3"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "2"},
        {"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "8"},
        {"PMIX_RANK": "2", "SLURM_NTASKS": "3"},
    ],
)
def test_every_launcher_of_mpi_says_the_rank_in_its_own_way(environ):
    for me in (Mpi(environ=environ), resolve(environ)):
        assert (me.worker_index, me.num_workers, me.is_chief) == (2, 3, False)
        assert (me.worker_addresses, me.bootstrap, me.environment) == ((), "mpi", "mpi")
        assert (me.task_type, me.task_id) == ("worker", 2)
        assert me.cluster_spec().num_tasks("worker") == 3


STEP = {
    "SLURM_STEP_NODELIST": "n[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
}


def test_slurm_tasks_of_a_node_get_consecutive_ports():
    me = Slurm(port_base=9000, environ=STEP)
    addresses = ("n08:9000", "n08:9001", "n09:9000", "n09:9001", "n10:9000")
    assert me.worker_addresses == addresses
    assert (me.worker_index, me.num_workers, me.environment) == (3, 5, "slurm")
    assert me.master() == "grpc://n09:9001"


def test_every_slurm_task_sees_the_same_cluster_and_jobs_have_ports_of_their_own():
    def addresses(**more):
        return resolve({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0", **more}).worker_addresses

    assert addresses() == addresses(SLURM_PROCID="1")
    first, second = (addresses(SLURM_JOB_ID=number) for number in "89")
    assert not {*first} & {*second}
    reserved = addresses(SLURM_STEP_RESV_PORTS="12000-12001")
    assert reserved[:2] == ("n08:12000", "n08:12001")


def test_slurm_tasks_may_be_dealt_out_in_a_circle_or_to_several_jobs():
    environ = {**STEP, "SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "0"}
    me = Slurm({"chief": 1, "worker": 3, "ps": 1}, 9000, environ=environ)
    assert me.worker_addresses == ("n08:9000", "n09:9000", "n10:9000", "n08:9001")
    assert me.cluster_spec().as_dict()["ps"] == ["n09:9001"]
    assert (me.task_type, me.task_id, me.worker_index) == ("worker", 2, 3)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "1"} | {
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({}, "127.0.0.1:29501"),
        ({"LOCAL_WORLD_SIZE": "2"}, "node7:29501"),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "fe80::1"}, "[fe80::1]:29501"),
    ],
)
def test_only_one_address_of_a_job_of_torchrun_is_known(change, first):
    me = resolve({**TORCHRUN, **change})
    assert me.worker_addresses == (first, "", "")
    assert (me.worker_index, me.environment, me.bootstrap) == (1, "torchrun", "tcp")
    assert "--master-port" in me.address_hint


@pytest.mark.parametrize(
    ("resolver", "environ", "message"),
    [
        (Mpi, {}, "MPI did not start this process"),
        (Mpi, {"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK is 'x', expected an int"),
        (Mpi, {"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK=2 is not below PMI_SIZE"),
        (Slurm, {"SLURM_STEP_NODELIST": ""}, "Slurm did not start this process"),
        (Slurm, {"SLURM_STEP_NODELIST": "n1"}, "lists 1 node, but tasks for 3"),
        (Slurm, {"SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
        (Slurm, {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', expected an integer"),
        (Slurm, {"SLURM_NODEID": "2"}, "should be on node 1 but is on node 2"),
        (Slurm, {"SLURM_DISTRIBUTION": "plane=2"}, "--distribution=block"),
        (partial(Slurm, {"worker": 4}), {}, "have 4 tasks, but Slurm started 5"),
        (partial(Slurm, None, 65535), {}, "Port 65536 is out of range"),
        (Torchrun, {"RANK": ""}, "torchrun did not start this .*: the environment lacks RANK,"),
        (Torchrun, {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected an integer"),
        (Torchrun, {"RANK": "3"}, "RANK=3 is not below WORLD_SIZE=3"),
        (Torchrun, {"MASTER_PORT": "65535"}, "rank 0 uses the next port"),
    ],
)
def test_what_is_wrong_in_an_environment_is_named(resolver, environ, message):
    with pytest.raises(ValueError, match=message):
        resolver(environ={**STEP, **TORCHRUN, **environ})


def test_a_simple_resolver_returns_its_arguments():
    me = Simple({"worker": ["a:1", "b:1"]}, "m:1", "worker", 1, "lab", num_accelerators={"GPU": 3})
    assert (me.master(), me.master("worker", 0), me.environment) == ("m:1", "a:1", "lab")
    assert (me.num_accelerators(), me.worker_index) == ({"GPU": 3}, 1)
    assert Simple({}).num_accelerators().keys() == {"GPU"}
    with pytest.raises(ValueError, match="is none of 'worker'"):
        Simple({"worker": ["a:1"]}, task_type="boss", task_id=0)


def test_a_simple_resolver_without_a_task_is_that_of_the_process_that_coordinates():
    me = Simple({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    assert (me.get_task_info(), me.worker_index, me.is_chief) == ((None, None), None, True)
    assert (me.master(), me.master("worker", 1), me.num_workers) == ("", "b:1", 2)
    assert me.master("worker", 0, rpc_layer="grpc") == "grpc://a:1"
    me.task_type, me.task_id, me.rpc_layer = "worker", 1, "http"
    assert (me.worker_index, me.is_chief, me.master()) == (1, False, "http://b:1")
    with pytest.raises(ValueError, match="needs to know the task of this process"):
        nd.MultiWorkerMirroredStrategy(Simple({"worker": ["a:1", "b:1"]}))


def test_tf_config_names_a_protocol_and_a_session_master_and_one_task_needs_no_name():
    more = '"rpc_layer": "grpc", "session_master": "m:1", "task": {"type": "worker", "index": 0}'
    me = TFConfig(environ={"TF_CONFIG": f'{{"cluster": {{"worker": ["a:1"]}}, {more}}}'})
    assert (me.master(), me.master("worker", 0)) == ("grpc://m:1", "grpc://a:1")
    alone = TFConfig(environ={"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, environment="lab")
    assert (alone.master(), alone.get_task_info(), alone.environment) == ("", (None, None), "lab")


def test_a_subclass_defines_the_cluster_without_the_constructor():
    class Mine(nd.cluster.ClusterResolver):
        def __init__(self):
            self.spec = nd.ClusterSpec({"worker": ["a:1", "b:1"]})

        task_type, task_id = "worker", property(lambda self: 1)

        def cluster_spec(self):
            return self.spec

    me = Mine()
    assert (me.get_task_info(), me.worker_index, me.master()) == (("worker", 1), 1, "b:1")


@pytest.mark.parametrize(
    ("clusters", "joined"),
    [
        ([{"ps": ["p:0"], "worker": ["w:0"]}], {"ps": ["p:0"], "worker": ["w:0"]}),
        ([{"ps": ["p:0"]}, {"worker": ["w:0"]}], {"ps": ["p:0"], "worker": ["w:0"]}),
        ([{"worker": ["w:4", "w:5"]}, {"worker": ["w:0"]}], {"worker": ["w:4", "w:5", "w:0"]}),
        ([{"worker": {7: "w:4"}}, {"worker": {3: "w:0"}}], {"worker": {3: "w:0", 7: "w:4"}}),
        ([{"worker": ["w:4"]}, {"worker": {3: "w:0"}}], {"worker": {0: "w:4", 3: "w:0"}}),
        ([{"worker": {1: "w:4", 3: "w:5"}}], {"worker": {1: "w:4", 3: "w:5"}}),
    ],
)
def test_a_union_has_the_tasks_of_all_resolvers(clusters, joined):
    union = nd.UnionResolver(*map(Simple, clusters))
    assert union.cluster_spec().as_dict() == joined
    assert (union.master(), union.get_task_info()) == ("", (None, None))


def test_a_union_refuses_tasks_of_the_same_index_and_takes_the_rest_from_the_first():
    twice = nd.UnionResolver(Simple({"worker": {7: "a:1"}}), Simple({"worker": {7: "b:1"}}))
    with pytest.raises(KeyError, match=r"tasks \[7\] of 'worker'"):
        twice.cluster_spec()
    more = {"environment": "lab", "num_accelerators": {"GPU": 8}, "rpc_layer": "grpc"}
    first = Simple({"ps": ["a:1", "b:1"]}, task_type="ps", task_id=1, **more)
    union = nd.UnionResolver(first, Simple({"worker": ["c:1"]}, task_type="worker", task_id=0))
    assert (union.get_task_info(), union.environment) == (("ps", 1), "lab")
    assert (union.master(), union.num_accelerators()) == ("grpc://b:1", {"GPU": 8})
    union.task_type, union.task_id = "worker", 0
    assert (union.worker_index, union.master("worker", 0)) == (0, "grpc://c:1")
    assert nd.UnionResolver(first, task_type="ps", task_id=0).get_task_info() == ("ps", 0)
    for resolvers, error in (((), ValueError), ((3,), TypeError)):
        with pytest.raises(error, match="UnionResolver needs"):
            nd.UnionResolver(*resolvers)


class Pods:
    """Imitates the client of Kubernetes: it lists the pods with a label."""

    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector):
        items = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(phase=phase, host_ip=address),
            )
            for name, phase, address in self.pods[label_selector.removeprefix("job-name=")]
        ]
        return SimpleNamespace(items=items)


def test_kubernetes_lists_running_pods_sorted_by_name():
    pods = Pods(
        a=[("t-b", "Running", "10.0.0.2"), ("t-9", "Running", "10.0.0.1")],
        b=[("t-c", "Running", "10.0.0.3")],
        tensorflow=[("t-d", "Failed", "10.0.0.4")],
    )
    labels = {"worker": ["job-name=a", "job-name=b"], "ps": ["job-name=b"]}
    me = nd.KubernetesClusterResolver(labels, 1, override_client=pods)
    me.task_type, me.task_id = "worker", 1
    workers = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]
    with pytest.raises(ValueError, match=r"10\.0\.0\.3:1"):  # Of two tasks.
        me.cluster_spec()
    me = nd.KubernetesClusterResolver({"worker": labels["worker"]}, 1, override_client=pods)
    me.task_type, me.task_id = "worker", 1
    assert me.cluster_spec().as_dict() == {"worker": workers}
    assert (me.worker_addresses, me.worker_index) == (tuple(workers), 1)
    assert (me.master(), me.master("worker", 2)) == ("grpc://10.0.0.2:1", "grpc://10.0.0.3:1")
    failed = nd.KubernetesClusterResolver(override_client=pods)
    with pytest.raises(RuntimeError, match='Pod "t-d" is not running; phase: "Failed"'):
        failed.cluster_spec()
    with pytest.raises(nd.errors.MissingDependencyError, match="pip install kubernetes"):
        nd.KubernetesClusterResolver()


def test_a_pod_that_starts_again_finds_its_new_address_and_those_of_the_others():
    pods = Pods(a=[("t-0", "Running", "10.0.0.1"), ("t-1", "Running", "10.0.0.2")])

    def start():
        me = nd.KubernetesClusterResolver({"worker": ["job-name=a"]}, 1, override_client=pods)
        me.task_type, me.task_id = "worker", 1
        return me.worker_addresses

    assert start() == ("10.0.0.1:1", "10.0.0.2:1")
    pods.pods["a"][1] = "t-1", "Running", "10.0.0.9"
    assert start() == ("10.0.0.1:1", "10.0.0.9:1")


@pytest.mark.parametrize(
    ("gpus", "tasks", "visible", "count"),
    [
        ({"gpus_per_node": 2, "gpus_per_task": 1}, None, "1", 1),
        ({"gpus_per_node": 4, "gpus_per_task": 2}, {"n08": 2, "n09": 2, "n10": 1}, "2,3", 2),
        ({"gpus_per_node": 4}, [2, 2, 1], "2,3", 2),
        ({"gpus_per_node": 4, "auto_set_gpu": False}, None, None, 2),
        ({}, None, None, None),
    ],
)
def test_slurm_tasks_of_a_node_share_its_gpus(gpus, tasks, visible, count):
    environ = dict(STEP)
    me = Slurm(tasks_per_node=tasks, rpc_layer="grpc", environ=environ, **gpus)
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert count is None or me.num_accelerators() == {"GPU": count}
    assert me.master().startswith("grpc://n09:")
    assert me.get_task_info() == ("worker", 3)


RANK_1 = {"SLURM_PROCID": "1"}


def test_slurm_tasks_need_no_more_gpus_than_a_node_has():
    with pytest.raises(RuntimeError, match="2 tasks with 2 GPUs each need more than the 3 GPUs"):
        Slurm(gpus_per_node=3, gpus_per_task=2, environ=dict(STEP))
    with pytest.raises(ValueError, match="have 4 tasks, but Slurm started 3"):
        Slurm({"worker": 4}, tasks_per_node=1, environ=STEP | {"SLURM_NODEID": "1", **RANK_1})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "LOCAL_RANK": "1"},  # Any script may set them.
        # A batch script may start tasks, but is none itself.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n1"},
    ],
)
def test_a_process_on_its_own_has_no_resolver(environ):
    assert resolve(environ) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_s_variables_are_all_set_or_none(missing):
    half = {name: text for name, text in TORCHRUN.items() if name != missing}
    with pytest.raises(ValueError, match=rf"lacks {missing}, and has only \w+, "):
        resolve(half)
    # Whoever started this process has said all that is needed.
    assert isinstance(resolve({**STEP, **half}), Slurm)
    assert isinstance(resolve({"PMI_RANK": "0", "PMI_SIZE": "2", **half}), Mpi)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and has only RANK"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "is set, only OMPI_COMM_WORLD_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "is set, only OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0"}, "the pairs .*PMI_RANK and PMI_SIZE, .*, only PMI_RANK"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK and SLURM_NTASKS is set, only PMIX_RANK"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "has no SLURM_STEP_NODELIST and no SLURM_JOB_NODELIST"),
    ],
)
def test_a_rank_without_the_number_of_ranks_does_not_train_alone(environ, message, monkeypatch):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        nd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    nd.MirroredStrategy(["cpu:0"]).close()  # Asks for no other process.


def test_what_was_written_for_this_process_comes_first():
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert isinstance(resolve({**tf_config(), **mpi, **STEP}), TFConfig)
    assert isinstance(resolve({**mpi, **STEP}), Mpi)
    assert isinstance(resolve({**STEP, **TORCHRUN}), Slurm)
    assert isinstance(resolve(TORCHRUN), Torchrun)
    # As after `srun torchrun`: Slurm started torchrun, and torchrun this process.
    started = {**STEP, **mpi, **TORCHRUN, "TORCHELASTIC_RUN_ID": "7"}
    assert isinstance(resolve(started), Torchrun)


def test_the_hosts_of_a_tpu_are_workers_and_one_host_is_alone():
    kind = nd.TPUClusterResolver
    resolver = kind(port=9000, environ={"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"})
    assert resolver.worker_addresses == ("a:9000", "b:9000", "c:9000")
    assert (resolver.worker_index, resolver.environment) == (2, "tpu")
    for alone in (kind("local", environ=TORCHRUN), kind(environ={"TPU_WORKER_HOSTNAMES": "a"})):
        assert (alone.num_workers, alone.is_chief) == (1, True)
    elsewhere = kind(environ=TORCHRUN)
    assert elsewhere.cluster_spec() == Torchrun(environ=TORCHRUN).cluster_spec()
    with pytest.raises(ValueError, match="must run on the hosts of that TPU"):
        kind("my-tpu", environ={})
    with pytest.raises(ValueError, match="TPU_WORKER_ID"):
        kind(environ={"TPU_WORKER_HOSTNAMES": "a,b"})

"""The pages of the API reference: which names have one, and the text of each, for Sphinx's autodoc.

`GROUPS` gives every public name its place. `write_pages` writes a page for each group and each name
under its shortest public spelling; `targets` says where each spelling in a guide leads.
"""

import inspect
import operator
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import ndistribute as nd
import ndistribute.compat.graph_supervisor
import ndistribute.compat.tf
import ndistribute.compat.tf1
import ndistribute.launcher.dask
import ndistribute.launcher.ray
import ndistribute.trace_report
import ndistribute.update_rules

# The groups in the order of the sidebar. `layers.*` are all names of a module that no group names.
GROUPS = {
    "Strategies": "Strategy OneDeviceStrategy MirroredStrategy CentralStorageStrategy "
    "MultiWorkerMirroredStrategy ParameterServerStrategy TPUStrategy RunOptions Elastic "
    "get_strategy has_strategy set_strategy in_cross_replica_context initialize_tpu_system",
    "Replicas": "ReplicaContext get_replica_context set_seed",
    "Values": "DistributedValues PerReplica Mirrored IndexedSlices",
    "Variables": "Variable VariableAggregation VariableSynchronization partitioners.*",
    "Gradients": "GradientTape custom_gradient stop_gradient logsumexp softmax log_softmax",
    "Compiled steps": "function cond while_loop",
    "Models": "Model Sequential models.clone_model models.load models.model_from_json models.* "
    "models.symbolic.SymbolicArray",
    "Layers": "layers.Layer layers.*",
    "Activations": "models.activations.* models.nn.*",
    "Initializers": "models.initializers.Initializer models.initializers.*",
    "Regularizers": "models.regularizers.Regularizer models.regularizers.*",
    "Losses": "losses.Loss losses.*",
    "Metrics": "metrics.Metric metrics.*",
    "Callbacks": "callbacks.Callback callbacks.*",
    "Summaries": "summary.*",
    "Checkpoints": "Checkpoint CheckpointManager models.latest_checkpoint models.load_checkpoint "
    "models.list_variables models.load_variable models.checkpoint_reader.CheckpointReader",
    "Optimizers": "optimizers.Optimizer optimizers.* update_rules.Rule",
    "Schedules": "optimizers.schedules.LearningRateSchedule optimizers.schedules.*",
    "Input": "Dataset data.text_lines data.csv_rows data.make_csv_dataset DistributedDataset "
    "DistributedIterator InputContext InputOptions InputReplicationMode AutoShardPolicy",
    "Collectives": "ReduceOp CommunicationOptions CommunicationImplementation CrossDeviceOps "
    "NcclAllReduce RingAllReduce HierarchicalCopyAllReduce ReductionToOneDevice",
    "Devices": "Device list_devices set_logical_cpus",
    "Clusters": "ClusterSpec cluster.ClusterResolver SimpleClusterResolver cluster.* "
    "TFConfigClusterResolver MPIClusterResolver SlurmClusterResolver TorchrunClusterResolver "
    "KubernetesClusterResolver TPUClusterResolver UnionResolver",
    "Parameter servers": "Server ClusterCoordinator RemoteValue PerWorkerValue",
    "Graph programs": "device graph.* graph.metrics.* graph.summary.*",
    "Estimators": "estimator.* estimator.early_stopping.* estimator.feature_column.*",
    "Jobs and traces": "launcher.ray.run launcher.dask.run timeline.span timeline.counter "
    "trace_report.explain trace_report.Trace trace_report.Event",
    "Guests": "interop.torch.* interop.jax.* interop.keras.* interop.horovod.* "
    "interop.horovod.elastic.*",
    "TensorFlow's names": "compat.tf compat.tf1 compat.graph_supervisor.Supervisor",
    "Errors": "DistributeError AuthenticationError CheckpointCorruptError CollectiveMismatchError "
    "CollectiveTimeoutError WorkerLostError errors.*",
}
# Methods and properties without an underscore that only the package calls; `_internal` names more.
INTERNAL = set(
    """
    add_bias add_kernel add_update add_updates assembled build_for check_can_go_back checked
    encloses exceeds finish_step generator graph_element improved initialize_with is_judged
    last_rows local_result log_rate mark memory_space named_variables namespace nodes of_counts
    parse penalties per_replica rate rate_at reduce_op run_step saves_after scoped set_outcome
    show_line state_at summed sums take_logs timeout to_device unique_name walk weighted writer
    """.split()
)
# Classes whose objects come from functions and methods, so that their pages show no constructor.
MADE = set(
    "Dataset DistributedDataset DistributedIterator PerWorkerValue RemoteValue graph.Operation "
    "ReplicaContext models.symbolic.SymbolicArray models.checkpoint_reader.CheckpointReader".split()
)
# Modules whose names stand back behind those of others, such as `graph.Variable`.
GUESTS = ("compat", "estimator", "graph", "interop", "launcher")
# The modules for other libraries, which only conf.py imports, with functions that only the package
# calls, and the guides in which their names stand before all others.
INTEROP = ("interop.horovod", "interop.jax", "interop.keras", "interop.torch")
INTERNAL_OF_INTEROP = {"in_replica", "takes"}
GUIDES = {"from-horovod": INTEROP[:1], "guests": INTEROP[1:], "reference/guests": INTEROP}
# What guides call an object of a class, as in `strategy.run`.
OBJECTS = dict(
    pair.split("=")
    for pair in "strategy=Strategy get_strategy=Strategy context=ReplicaContext tape=GradientTape "
    "get_replica_context=ReplicaContext variable=Variable dataset=Dataset model=Model "
    "layer=layers.Layer metric=metrics.Metric optimizer=optimizers.Optimizer "
    "checkpoint=Checkpoint manager=CheckpointManager coordinator=ClusterCoordinator".split()
)
METHODS = (property, cached_property, classmethod, staticmethod)
# Methods whose name alone is clear; another single word needs its class or parentheses.
CLEAR = {"compile", "cond", "evaluate", "fit", "logsumexp", "predict", "softmax"}


def find(name: str) -> Any:
    """Return what a name such as ``layers.Dense`` stands for."""
    return operator.attrgetter(name)(nd)


@cache
def public_names() -> dict[str, str]:
    """Return the shortest spelling of each public name, by each of its spellings."""
    spellings = dict(_exported(nd, ""))
    for guest in INTEROP:
        if module := sys.modules.get(f"ndistribute.{guest}"):
            spellings |= {f"{guest}.{each}": find(f"{guest}.{each}") for each in _defined(module)}
    shortest: dict[Any, str] = {}
    for name in sorted(spellings, key=lambda name: (name.count("."), name)):
        value = spellings[name]
        shortest.setdefault(id(value) if callable(value) else name, name)
    return {n: shortest[id(v) if callable(v) else n] for n, v in spellings.items()}


def _exported(module: ModuleType, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from _exported(value, f"{prefix}{name}.")
        elif not name.startswith("__"):
            yield prefix + name, value


def _defined(module: ModuleType) -> Iterator[str]:
    """Yield the names of the functions and classes of a module, and of those in its instances."""
    for name, value in vars(module).items():
        home = str(getattr(value, "__module__", None)).removeprefix("ndistribute.")
        if name[0] != "_" and name not in INTERNAL_OF_INTEROP and home in INTEROP:
            inside = [] if callable(value) else vars(type(value))
            yield from [f"{name}.{each}" for each in inside if each[0] != "_"] or [name]


@cache
def places() -> dict[str, list[str]]:
    """Return the names of each group, in order, with what `module.*` stands for in its place."""
    named = {name for text in GROUPS.values() for name in text.split() if "*" not in name}
    rest = set(public_names().values()) - named
    groups: dict[str, list[str]] = {}
    for group, text in GROUPS.items():
        names: list[str] = []
        for name in text.split():
            module = name.removesuffix(".*")
            children = sorted(n for n in rest if n.rpartition(".")[0] == module)
            names += [name] if module == name else children
        groups[group] = names
    return groups


@cache
def classes() -> dict[type, str]:
    """Return the classes that have a page, with their names."""
    everything = ((find(name), name) for names in places().values() for name in names)
    return {value: name for value, name in everything if inspect.isclass(value)}


def members(kind: type) -> dict[str, type]:
    """Return the public methods and properties of a class, each with the class that shows it.

    That is the class which describes the member, or the first one with a page that inherits it.
    """
    shown: dict[str, type] = {}
    hidden = INTERNAL.union(getattr(kind, "_internal", ()))
    documented = [base for base in kind.__mro__ if base in classes()]
    for base in kind.__mro__:
        is_ours = base.__module__.partition(".")[0] == "ndistribute"
        for name, value in vars(base).items() if is_ours else ():
            is_method = inspect.isroutine(value) or isinstance(value, METHODS)
            described = is_method and getattr(value, "__doc__", None)
            if name[0] != "_" and name not in shown and name not in hidden and described:
                shown[name] = [kind, *(heir for heir in documented if issubclass(heir, base))][-1]
    return shown


@cache
def targets() -> dict[str, str]:
    """Return the page or the method that each spelling in a guide leads to.

    Where two names end in the same words, such as `Variable`, the shorter one has the words.
    """
    leads = {module: module for group in GROUPS for module in _modules(group)}
    bare: dict[str, dict[str, type]] = {}  # The places of each last word, with their classes.
    whole = {name: name for group in places().values() for name in group} | public_names()
    for name in sorted(whole, key=lambda n: (n.partition(".")[0] in GUESTS, n.count("."), n)):
        target = whole[name]
        last, value = name.rpartition(".")[2], find(target)
        leads.setdefault(name, target)
        if name.startswith("interop.horovod."):  # Only its guide calls names by their last words.
            continue
        if last[0].isupper():
            leads.setdefault(last, target)
        else:
            bare.setdefault(last, {})[target] = object
        if inspect.isclass(value) and issubclass(value, Enum):
            leads |= {f"{name}.{each.name}": f"{target}.{each.name}" for each in value}
        for method, home in members(value).items() if inspect.isclass(value) else ():
            goal = f"{classes()[home]}.{method}"
            leads.setdefault(f"{name}.{method}", goal)
            leads.setdefault(f"{last}.{method}", goal)
            bare.setdefault(method, {})[goal] = home
    for receiver, name in OBJECTS.items():
        for method, home in members(find(name)).items():
            leads.setdefault(f"{receiver}.{method}", f"{classes()[home]}.{method}")
    for last, goals in bare.items():
        hosts = {goal for goal in goals if goal.partition(".")[0] not in GUESTS} or goals
        kinds = [goals[goal] for goal in hosts]
        roots = [goal for goal in hosts if all(issubclass(kind, goals[goal]) for kind in kinds)]
        if len(roots) == 1:
            leads.setdefault(f"{last}()", roots[0])
            leads.setdefault(last, roots[0])
    return leads


def target(text: str, page: str = "") -> str | None:
    """Return the name that a text in backticks stands for on a page, such as ``strategy.run(x)``.

    An attribute of a class may be described in its docstring alone, which only the page shows.
    """
    name = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", text)
    short = re.sub(r"^(ndistribute|nd|hvd)\.", "", name)
    guide = GUIDES.get(page.removeprefix("docs/"), ())
    for guest in guide or [guest for guest in INTEROP if f"/nd.{guest}." in page]:
        if f"{guest}.{short}" in targets():
            return targets()[f"{guest}.{short}"]
        if isinstance(op := vars(sys.modules[f"ndistribute.{guest}"]).get(short), nd.ReduceOp):
            return f"ReduceOp.{op.name}"
    is_clear = "_" in name or "." in name or name in CLEAR or not name.islower()
    if name != text and "." not in short:
        return targets().get(f"{short}()") or targets().get(short)
    home, _, attribute = short.rpartition(".")
    home = OBJECTS.get(home) or targets().get(home, "")
    is_class = home.rpartition(".")[2][:1].isupper()
    return targets().get(short, f"{home}.{attribute}" if is_class else None) if is_clear else None


def readable(arguments: str) -> str:
    """Return arguments as a program writes them, with dots for all that a function passes on."""
    text = arguments.replace("<factory>", "...").replace("<class 'numpy.", "<class '.np.")
    text = re.sub(r"<class '[\w.]*?\.((?:np\.)?\w+)'>", r"\1", text)
    rest = re.sub(r"\*args: \S*Any, \*\*\w+: \S*Any", "...", text)
    return text if rest == text else re.sub(r"~[\w.]+\.", "", rest)


def write_pages(folder: Path) -> None:
    """Write the pages of groups and names into a folder, in place of former ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for group, names in places().items():
        Path(folder, f"{slug(group)}.rst").write_text(_group_page(group, names))
        for name in names:
            Path(folder, f"nd.{name}.rst").write_text(_page(name))


@cache
def group_pages() -> dict[str, str]:
    """Return the page of the group of each name, by the page of the name."""
    pairs = ((group, name) for group, names in places().items() for name in names)
    return {f"docs/reference/nd.{name}": f"docs/reference/{slug(group)}" for group, name in pairs}


def slug(group: str) -> str:
    """Return the name of the page of a group."""
    return group.lower().replace(" ", "-").replace("'", "")


def _heading(title: str, mark: str = "=") -> str:
    return title.replace("_", "\\_") + f"\n{mark * 2 * len(title)}\n\n"


def _toctree(entries: list[str]) -> str:
    return ".. toctree::\n   :hidden:\n\n" + "".join(f"   {entry}\n" for entry in entries) + "\n"


def sections(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the sections of docs/index.md, the sidebar: the caption, and each title and path."""
    for section in re.finditer(r"^## (.+)\n((?:(?!## ).*\n?)*)", page, re.MULTILINE):
        entries = re.findall(r"^- \[([^\]]+)\]\(([^)#]+\.md)\)", section[2], re.MULTILINE)
        if entries:
            yield section[1], entries


def add_toctrees(_app: Any, docname: str, source: list[str]) -> None:
    """Append a toctree for each section of the first page, and all names to the reference."""
    if docname == "docs/index":
        for caption, entries in [*sections(source[0])]:
            links = "".join(f"{title} <{path}>\n" for title, path in entries)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{links}```\n"
    if docname == "docs/reference":
        source[0] += f"\n```{{eval-rst}}\n{overview()}```\n"


def overview() -> str:
    """Return the list of all groups with their names, and the toctree of the groups."""
    text = _toctree([f"reference/{slug(group)}" for group in places()])
    for group, names in places().items():
        links = ", ".join(f":doc:`{_short(name)} <reference/nd.{name}>`" for name in names)
        text += f":doc:`reference/{slug(group)}`\n   {links}\n\n"
    return text


def _short(name: str) -> str:
    """Return the name that a reader knows: of modules only what `import ndistribute` lacks."""
    if name.startswith(("compat", "launcher", "interop")):
        return name.removeprefix("interop.")
    return name.rpartition(".")[2]


def _group_page(group: str, names: list[str]) -> str:
    """Return the table of a group; that of some has a part for each file that defines names."""
    in_parts = group in ("Layers", "Graph programs", "Estimators", "Guests")
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(_part(name) if in_parts else "", []).append(name)
    text = _heading(group) + _toctree([f"{_short(name)} <nd.{name}>" for name in names])
    for module in _modules(group):
        text += f".. py:module:: nd.{module}\n   :no-index-entry:\n\n"
    for part, inside in parts.items():
        text += _heading(part, "-") if part else ""
        text += f"{_summary(sys.modules[part])}\n\n" if part in sys.modules else ""
        text += ".. list-table::\n   :class: names\n\n"
        for name in inside:
            text += f"   * - :doc:`nd.{name}`\n     - {_summary(find(name))}\n"
        text += "\n"
    return text


def _modules(group: str) -> list[str]:
    """Return the modules whose names are in a group."""
    return [name.removesuffix(".*") for name in GROUPS[group].split() if name.endswith("*")]


def _part(name: str) -> str:
    if name.startswith("interop."):
        return "ndistribute." + ".".join(name.split(".")[:2])
    module = getattr(find(name), "__module__", None) or "constants"
    return module.rpartition(".")[2].replace("_", " ").capitalize()


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring; a constant has none."""
    text = inspect.getdoc(value) if callable(value) or inspect.ismodule(value) else ""
    return " ".join((text or "").partition("\n\n")[0].split())


def _page(name: str) -> str:
    """Return the page of a class, a function, a module or a constant."""
    value = find(name)
    text = _heading(f"nd.{name}")
    if isinstance(value, ModuleType):
        return text + f".. automodule:: nd.{name}\n   :no-members:\n"
    if inspect.isclass(value):
        return text + _class_body(name, value)
    if isinstance(value, str):  # Autodoc would show the docstring of `str`.
        return text + f".. py:data:: nd.{name}\n   :value: {value!r}\n"
    return text + f".. auto{'function' if inspect.isroutine(value) else 'data'}:: nd.{name}\n"


def _class_body(name: str, kind: type) -> str:
    text = f".. autoclass:: nd.{name}\n\n"
    if issubclass(kind, Enum):
        return text + "".join(f"   .. autoattribute:: nd.{name}.{each.name}\n" for each in kind)
    inherited: dict[type, list[str]] = {}
    shown = [(_directive(kind, member), member, home) for member, home in members(kind).items()]
    # Methods come first, such as `fit`, then properties, then former names; each as in the source.
    shown.sort(key=lambda x: (x[1][:12] == "experimental", x[0] != "method", x[1] not in CLEAR))
    for directive, member, home in shown:
        if home is kind:
            text += f"   .. auto{directive}:: nd.{name}.{member}\n"
        else:
            inherited.setdefault(home, []).append(member)
    for home, names in inherited.items():
        base = f"nd.{classes()[home]}"
        links = ", ".join(f":py:obj:`{each} <{base}.{each}>`" for each in names)
        text += f"\n   .. rubric:: Inherited from :doc:`{base}`\n\n   {links}\n"
    return text


def _directive(kind: type, member: str) -> str:
    value = inspect.getattr_static(kind, member)
    if isinstance(value, property):
        return "property"
    is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
    return "method" if is_method else "attribute"


def constructor(kind: type, signature: Any = inspect.signature) -> inspect.Signature:
    """Return the signature of a class, with what ``*args`` and ``**options`` pass to its bases."""
    if issubclass(kind, nd.layers.RNN) and kind is not nd.layers.RNN:
        cell = getattr(nd.layers, f"{kind.__name__}Cell")
        return _around(constructor(cell, signature), constructor(nd.layers.RNN, signature))
    ours = [base for base in kind.__mro__ if base.__module__.startswith("ndistribute")]
    inits = [vars(base)["__init__"] for base in ours if "__init__" in vars(base)]
    makers = [vars(base)["__new__"] for base in ours if "__new__" in vars(base)]
    if classes().get(kind) in MADE:
        return inspect.Signature()
    if not inits and makers and ours[-1].__name__ != "Explaining":
        inits = [kind.__new__]
    lists = [[*signature(each).parameters.values()][1:] for each in inits]
    merged = [_typed(each) for each in _merged(lists) if each.name[0] != "_"]
    if issubclass(kind, nd.layers.Layer):  # Its options are those of its weights.
        merged = [each for each in merged if each.kind is not each.VAR_KEYWORD]
        known = {each.name for each in merged}
        merged += [each for each in _of_weights(kind.weights_of_kind) if each.name not in known]
    return inspect.Signature(merged)


def _around(cell: inspect.Signature, rnn: inspect.Signature) -> inspect.Signature:
    """Return the signature of a layer around a cell, which takes the arguments of `RNN`, too."""
    more = rnn.parameters.values()
    layer = [each for each in more if each.name not in {"cell", *cell.parameters}]
    keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in layer]
    return inspect.Signature([*cell.parameters.values(), *keywords])


def _of_weights(starts: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a layer that set how its weights start, and their regularizers."""
    for weight, start in starts.items():
        key = weight.removesuffix("_kernel")
        for what, default in ("initializer", start), ("regularizer", None):
            yield inspect.Parameter(
                f"{key}_{what}",
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=str | Callable[[Any], Any] | None,
            )


def _typed(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a generated constructor with the type of its default."""
    default = parameter.default
    if parameter.annotation is not parameter.empty or default in (None, parameter.empty):
        return parameter
    rate = float | nd.optimizers.schedules.LearningRateSchedule
    is_rate = parameter.name == "learning_rate"
    return parameter.replace(annotation=rate if is_rate else type(default))


def _merged(lists: list[list[inspect.Parameter]]) -> list[inspect.Parameter]:
    if not lists:
        return []
    taken = FILLED_IN.union(parameter.name for parameter in lists[0]) - PASSED_ON
    parameters: list[inspect.Parameter] = []
    for parameter in lists[0]:
        if parameter.name not in PASSED_ON or not lists[1:]:
            parameters.append(parameter)
            continue
        more = [each for each in _merged(lists[1:]) if each.name not in taken]
        are_keywords = parameter.kind is parameter.VAR_KEYWORD
        parameters += [each for each in more if (each.kind in _KEYWORDS) == are_keywords]
    return parameters


# The arguments that a constructor passes to that of its base class, and one that it passes itself.
PASSED_ON = {"args", "options"}
FILLED_IN = {"head"}
_KEYWORDS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def name_modules() -> None:
    """Let Sphinx see modules and classes under the names that programs use, such as `nd.layers`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ndistribute"]:
        sys.modules["nd" + name.removeprefix("ndistribute")] = sys.modules[name]
    _name_modules(nd, "nd")
    for kind, name in classes().items():  # Sphinx calls a class of another name an alias.
        kind.__name__ = kind.__qualname__ = name.rpartition(".")[2]


def _name_modules(module: ModuleType, name: str) -> None:
    sys.modules[name] = module
    for child in module.__all__:
        if isinstance(getattr(module, child), ModuleType):
            _name_modules(getattr(module, child), f"{name}.{child}")

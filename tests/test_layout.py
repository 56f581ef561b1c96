"""Where the code lies and what it may do: rules that no type checker or linter knows."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
import yaml

import lib
import stages
from lib.pipeline.graph import STAGES
from stages.composing import compose
from stages.dvc import RECIPE

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for top in ("lib", "stages") for path in (CHECKOUT / top).rglob("*.py"))
CODE = [*SOURCES, *sorted((CHECKOUT / "tests").rglob("*.py"))]
MODULES = sorted(
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
)
LONGEST_FILE, LONGEST_FAMILY, LONGEST_FUNCTION = 300, 350, 60
HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate", "hydra", "omegaconf", "rich")

DYNAMIC = {"import_module", "__import__", "exec", "eval", "run_module", "run_path"}
MAY_IMPORT_BY_NAME = {"lib/families/__init__.py"}

# Streams of numbers that are no function of (seed, stream, counter, sample).
DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli"),
    *("multinomial", "manual_seed", "seed", "Generator", "default_rng", "RandomState", "fork_rng"),
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "shuffle", "choice"),
    *("getrandbits", "urandom", "randbytes", "token_hex", "token_bytes"),
}
RANDOM_ROOTS = {"torch", "np", "numpy", "random", "os", "secrets"}
OUR_RANDOM = "lib.random"
MAY_DRAW = {
    "lib/random.py",
    "lib/training/step.py",  # adapter.dropout: torch draws, seeded anew for each step
}
MAY_DRAW_IN = "lib/families/"  # building a tiny base, between fork_rng's two ends


def _name(path):
    return path.relative_to(CHECKOUT).as_posix()


def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def _run(*command, cwd=CHECKOUT):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def _python(code, *, cwd=CHECKOUT):
    return _run(sys.executable, "-c", code, cwd=cwd)


def _dotted(node):
    """`a.b.c` of an attribute chain, or an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def foreign_draws(tree):
    """Lines on which a random source other than lib.random is used."""
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("lib", OUR_RANDOM)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            modules = []
        if {"random", "secrets", "numpy.random", "torch.random"} & set(modules):
            yield node.lineno
        if isinstance(node, ast.Attribute):
            root, *rest = _dotted(node).split(".")
            chained = root in RANDOM_ROOTS and root not in ours and rest and rest[-1] in DRAWS
            in_place = node.attr in DRAWS and node.attr.endswith("_")
            if chained or in_place:
                yield node.lineno


def dynamic_imports(tree):
    """Lines on which code is found by a name that only the run knows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _dotted(node.func).split(".")[-1]
            # `model.eval()` is torch's switch, the built-in has no dot.
            if called in DYNAMIC and not (
                called == "eval" and isinstance(node.func, ast.Attribute)
            ):
                yield node.lineno


def blanket_handlers(tree):
    """Lines of handlers that catch everything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {_dotted(kind) for kind in types if kind is not None}
            if node.type is None or names & {"Exception", "BaseException"}:
                yield node.lineno


def long_functions(tree):
    """Names of functions longer than the limit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.name}: {length}"


def _found(check, paths):
    return {_name(path): lines for path in paths if (lines := list(check(_tree(path))))}


def _code_deps(stage):
    """The files that DVC must watch for a stage, by grimp; of the graph only the stage's module."""
    graph = grimp.build_graph("lib", cache_dir=None)  # its cache goes by times of files
    family = compose([RECIPE]).family.name
    modules = {f"lib.pipeline.{stage}", f"lib.families.{family}"}
    modules |= {m for module in modules for m in graph.find_upstream_modules(module)}
    paths = (CHECKOUT / module.replace(".", "/") for module in modules)
    return {_name(p / "__init__.py" if p.is_dir() else p.with_suffix(".py")) for p in paths}


@pytest.mark.parametrize("package", [lib, stages], ids=lambda package: package.__name__)
def test_lib_and_stages_come_from_this_checkout(package):
    folder = Path(package.__file__).resolve().parent
    name = package.__name__
    assert folder == CHECKOUT / name, f"another distribution shadows `{name}`: found {folder}"


def test_git_tracks_the_library_and_ignores_none_of_it():
    if _run("git", "rev-parse", "--is-inside-work-tree").returncode:
        pytest.skip("not a git checkout")
    assert "lib/__init__.py" in _run("git", "ls-files", "lib").stdout.splitlines()
    ignored = _run("git", "check-ignore", "--no-index", *map(_name, CODE))
    assert ignored.stdout.splitlines() == []


def test_nothing_of_ours_is_importable_elsewhere(tmp_path):
    for name in ("lib", "stages", "conf", "tests"):
        found = _python(f"import {name}; print({name}.__path__)", cwd=tmp_path)
        assert "ModuleNotFoundError" in found.stderr, found.stdout


def test_tests_are_no_packages():
    assert list((CHECKOUT / "tests").rglob("__init__.py")) == []
    assert not (CHECKOUT / "tests" / "lib").exists()


def test_only_the_families_are_imported_by_name():
    assert set(_found(dynamic_imports, SOURCES)) == MAY_IMPORT_BY_NAME


def test_every_draw_comes_from_lib_random():
    drawing = set(_found(foreign_draws, SOURCES))
    outside = {name for name in drawing - MAY_DRAW if not name.startswith(MAY_DRAW_IN)}
    assert outside == set()
    assert drawing >= MAY_DRAW, "an exception that is no longer needed"


def test_global_generators_are_seeded_only_where_their_state_is_put_back():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if "manual_seed" in text:
            assert "fork_rng" in text or _name(path) == "lib/training/step.py", _name(path)


def test_no_handler_catches_everything():
    assert _found(blanket_handlers, CODE) == {}


def test_sources_are_ascii():
    texts = [*CODE, *(CHECKOUT / "conf").rglob("*.yaml"), CHECKOUT / "pyproject.toml"]
    assert [_name(path) for path in texts if not path.read_bytes().isascii()] == []


def test_files_are_short():
    def limit(path):
        return LONGEST_FAMILY if path.parent.name == "families" else LONGEST_FILE

    counts = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {n: c for n, c in counts.items() if c > limit(CHECKOUT / n)} == {}


def test_functions_are_short():
    assert _found(long_functions, SOURCES) == {}


@pytest.mark.parametrize(
    ("check", "bad"),
    [
        (dynamic_imports, "importlib.import_module(name)"),
        (dynamic_imports, "__import__(name)"),
        (dynamic_imports, "eval(text)"),
        (foreign_draws, "import random"),
        (foreign_draws, "from random import shuffle"),
        (foreign_draws, "import numpy.random"),
        (foreign_draws, "x = torch.randn(3)"),
        (foreign_draws, "torch.manual_seed(0)"),
        (foreign_draws, "np.random.default_rng(0)"),
        (foreign_draws, "torch.nn.init.normal_(weight)"),
        (foreign_draws, "weight.uniform_(0, 1)"),
        (blanket_handlers, "try:\n    f()\nexcept Exception:\n    pass"),
        (blanket_handlers, "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
        (blanket_handlers, "try:\n    f()\nexcept:\n    pass"),
        (long_functions, "def f():\n" + "    pass\n" * LONGEST_FUNCTION),
    ],
)
def test_each_rule_sees_its_breach(check, bad):
    assert list(check(ast.parse(bad)))


@pytest.mark.parametrize(
    ("check", "good"),
    [
        (dynamic_imports, "model.eval()"),
        (foreign_draws, "from lib import random\nrandom.normal((1,), seed=0)"),
        (foreign_draws, "from lib.random import normal"),
        (foreign_draws, "os.path.join(a, b)"),
        (blanket_handlers, "try:\n    f()\nexcept OSError:\n    raise"),
        (long_functions, "def f():\n" + "    pass\n" * (LONGEST_FUNCTION - 1)),
    ],
)
def test_no_rule_sees_a_breach_where_there_is_none(check, good):
    assert list(check(ast.parse(good))) == []


@pytest.mark.nightly
def test_every_module_is_importable_alone():
    """Each in a world where no other module of ours was imported before.

    What could make it red, a circle of imports, `lint-imports` refuses in any case.
    """
    code = f"""
import importlib, sys
failed = []
for name in {MODULES!r}:
    for old in [m for m in sys.modules if m.split(".")[0] in ("lib", "stages")]:
        del sys.modules[old]
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
print(failed)
"""
    done = _python(code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("stages")])
def test_a_door_opens_without_anything_heavy(name):
    if name in ("stages.composing", "stages.launching"):
        heavy = [m for m in HEAVY if m not in ("hydra", "omegaconf")]
    else:
        heavy = list(HEAVY)
    done = _python(f"import sys, {name}; print([m for m in {heavy!r} if m in sys.modules])")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_plan_imports_no_model_library(tmp_path):
    code = f"""
import sys
from stages.plan import show_plan
from stages import main
paths = ["paths.store={tmp_path}/store", "paths.outputs={tmp_path}/outputs"]
try:
    main(show_plan, arguments=["family=flux", "family.base=tiny", *paths])
except SystemExit as exit:
    assert exit.code == 0
heavy = ("torch", "diffusers", "transformers", "peft", "accelerate")
print([m for m in heavy if m in sys.modules], file=sys.stderr)
"""
    done = _python(code)
    assert done.stderr.strip() == "[]"
    assert "prepare_dataset" in done.stdout


def test_dvc_runs_every_stage_of_the_graph_on_what_the_stages_upstream_point_to():
    stages_of_dvc = yaml.safe_load((CHECKOUT / "dvc.yaml").read_text())["stages"]
    assert list(stages_of_dvc) == ["compose", *STAGES]
    composed = {
        "conf",
        "lib/config.py",
        "lib/rules.py",
        "lib/rules_across.py",
        "lib/schema.py",
        "stages/composing.py",
    }
    composed |= {f"lib/pipeline/{name}.py" for name in ("contract", "pointers", *STAGES)}
    assert set(stages_of_dvc["compose"]["deps"]) >= composed
    made = {out for text in stages_of_dvc["compose"]["outs"] for out in text}
    config = compose([RECIPE])
    assert config.dataset.root == str(CHECKOUT / "examples" / "emoji")
    assert "examples/emoji" in stages_of_dvc["prepare_dataset"]["deps"]
    assert (config.paths.store, config.paths.outputs) == ("store", "outputs")
    for name in STAGES:
        stage = stages_of_dvc[name]
        outs = [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, ())]
        assert all(options["cache"] is False for out in outs for options in out.values())
        needs = {dep for dep in stage["deps"] if dep.startswith("outputs/")}
        assert f"outputs/dvc/config/{name}.json" in needs
        assert needs <= made, f"{name} depends on what no earlier stage makes"
        made |= {path for out in outs for path in out}
        assert {f"outputs/dvc/{name}.json", f"store/runs/dvc-{name}.json"} <= made
        assert stage["cmd"] == f"python -m stages.dvc {name}"


@pytest.mark.parametrize("stage", STAGES)
def test_dvc_watches_the_code_of_a_stage_and_no_other(stage):
    """Too few deps keep what is stale; too many rebuild the latents at every edit."""
    deps = yaml.safe_load((CHECKOUT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    needed, found = _code_deps(stage), {dep for dep in deps if dep.endswith(".py")}
    add = "".join(f"      - {path}\n" for path in sorted(needed - found))
    drop = "".join(f"      - {path}\n" for path in sorted(found - needed))
    assert needed == found, f"dvc.yaml, deps of {stage}: add\n{add}and remove\n{drop}"

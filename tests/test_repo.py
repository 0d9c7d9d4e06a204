"""The pages say what is true, and imports go one way."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bench.__main__
import config
import eval as evaluation
from tasks import sft

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LOG = ROOT / "runs" / "LOG.md"  # its flags and commands are those of their day

OTHER_FLAGS = {  # of torchrun, pip and TRL
    "--standalone", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--help",
    "--shutdown-timeout", "--signals-to-handle", "--no-deps", "--config", "--max-restarts",
}  # fmt: skip

FOLDERS = ("engines", "integrations", "tasks", "runtime", "related", "bench")
# What the modules of a folder may import, here and inside functions: folders, or modules of the
# root. `root` stands for all modules of the root. related is found by name only.
MAY_IMPORT = {
    "root": {"root", "engines", "tasks", "runtime"},
    "engines": {"engines", "runtime", "dppo", "rollout", "packing"},
    "integrations": {"integrations", "dppo", "sampler"},
    "tasks": {"tasks", "runtime", "packing", "chat_format"},
    "tasks.sft": {"tasks", "runtime", "root"},  # a program, which the root does not import
    "runtime": {"runtime"},
    "related": {"related", "root", "engines", "tasks", "runtime"},
    "bench": {"bench", "related", "root", "engines", "integrations", "tasks", "runtime"},
}


# ---------------------------------------------------------------------------- README and docs


def page_parameter(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def without_code_blocks(text):
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]


def test_readme_begins_with_the_essentials():
    """Fails if the README's head no longer says which DPPO this is, or how to start it."""
    head = "\n".join(README.splitlines()[:20])
    assert "2603.04135" in head
    assert "Divergence" in head

    first = README.index("pip install -r requirements.txt && python train.py")
    assert first < README.index("pip install -r requirements.txt && pytest")
    assert first < README.index("## The idea")


@page_parameter([*PAGES, LOG])
def test_links_exist(path):
    """Fails if a page links to a missing file or heading."""
    for link in re.findall(r"\]\(([^)]+)\)", without_code_blocks(path.read_text())):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def known_flags():
    """The flags of all our programs and scripts."""
    kinds = (config.Config, evaluation.EvalConfig, sft.Config)
    names = {field.name for kind in kinds for field in fields(kind)}

    related = [importlib.import_module(f"related.{path.stem}") for path in related_files()]
    programs = [module.main for module in related if hasattr(module, "main")]
    for program in [*bench.__main__.COMMANDS.values(), *programs]:
        names |= set(inspect.signature(program).parameters)

    flags = {config.flag(name) for name in names}
    for script in ROOT.glob("runs/*.sh"):  # the labels of its `case`
        flags |= set(re.findall(r"^ *(--[a-z0-9-]+)\)", script.read_text(), re.MULTILINE))
    return flags | {"--json"} | OTHER_FLAGS  # --json is the parameter json_file


def related_files():
    return [path for path in ROOT.glob("related/*.py") if path.stem != "__init__"]


@page_parameter(PAGES)
def test_flags_exist(path):
    """Fails if a page names a flag that no program has, say after a rename."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text()))
    assert named <= known_flags()


@page_parameter(PAGES)
def test_commands_exist(path):
    """Fails if a page names a bench or a module that is gone, or a script that has moved."""
    text = " ".join(path.read_text().split())  # a command may be broken over two lines
    assert set(re.findall(r"python -m bench (\w+)", text)) <= {*bench.__main__.COMMANDS}

    for module in re.findall(r"python -m ((?:tasks|related|runtime)\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for script in re.findall(r"\b(?:python|bash|sh) ((?:[\w-]+/)+[\w-]+\.(?:py|sh))", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("name", ["Config", "EvalConfig"])
def test_help_explains_every_flag(name):
    """Fails if a field has no docstring, or one that is not a whole sentence."""
    tree = ast.parse((ROOT / "flags.py").read_text())
    (body,) = (node.body for node in tree.body if getattr(node, "name", "") == name)
    for field, text in zip(body[::2], body[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign)
        said = " ".join(text.value.value.split())
        assert re.fullmatch(r"[A-Za-z].{14,}[.]", said), f"{field.target.id}: {said}"


@pytest.mark.parametrize("program", ["train", "eval"])
def test_help_is_answered_at_once(program):
    """Fails if --help waits for PyTorch and transformers, which take seconds to import."""
    run = "import runpy, sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    code = f"{run}sys.argv[1:] = ['--help']; runpy.run_path('{program}.py', run_name='__main__')"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--max-new-tokens" in found.stdout
    assert found.stdout.endswith("False\n")


def test_names_in_the_readme_exist():
    """Fails if a function, constant or file that the README names is renamed."""
    linked = {(name, file) for name, file in re.findall(r"\[`([\w.]+)`\]\((\w+)\.py\)", README)}
    for name, file in linked:
        if name != f"{file}.py":
            assert has(importlib.import_module(file), name), name

    users = {"myreward.py", "mine.py"}  # files that a reader makes
    for name in set(re.findall(r"`(\w+\.\w+)`", README)) - users - {name for name, _ in linked}:
        first, second = name.split(".")
        if second in ("py", "sh"):
            assert (ROOT / name).exists(), name
        else:
            assert has(importlib.import_module(first), second), name


def has(module, dotted_name):
    found = module
    for part in dotted_name.split("."):
        found = getattr(found, part, None)
    return found is not None


# ---------------------------------------------------------------------------- imports


def our_modules():
    """Every module of ours, by the name that imports it: its path."""
    modules = {path.stem: path for path in ROOT.glob("*.py")}
    for name in FOLDERS:
        for path in (ROOT / name).glob("*.py"):
            prefix = "" if name == "integrations" else f"{name}."  # they are top-level modules
            modules[f"{prefix}{path.stem}".removesuffix(".__init__")] = path
    return modules


def imported(path, modules):
    """The modules of ours that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in inside]
        else:
            continue
        yield from (name for name in names if name in modules)


def test_layers():
    """Fails if modules import each other in a circle, or a folder imports what it may not."""
    modules = our_modules()
    graph = {name: set(imported(path, modules)) for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle

    folder = {
        name: path.parent.name if path.parent != ROOT else "root" for name, path in modules.items()
    }
    wrong = {
        (name, needed)
        for name, all_needed in graph.items()
        for needed in all_needed
        if not {needed, folder[needed]} & MAY_IMPORT.get(name, MAY_IMPORT[folder[name]])
    }
    assert not wrong


def test_judge_needs_no_torch():
    """Fails if the judge's module imports torch, which its 1 GiB of memory cannot hold."""
    check = "import sys, runtime.math_judge; print('torch' in sys.modules)"
    command = [sys.executable, "-c", check]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


# ---------------------------------------------------------------------------- files


def repository_files():
    """Every file that git tracks or would track, but none of a user's virtual environment."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in sorted(set(listed.stdout.splitlines())))
    environments = {path.parent for path in ROOT.glob("*/pyvenv.cfg")}
    return [path for path in paths if path.exists() and not environments & {*path.parents}]


def test_python_O_changes_nothing():
    """Fails if a program of ours asserts something, which `python -O` leaves out."""
    for path in repository_files():
        if path.suffix == ".py" and ROOT / "tests" not in path.parents:
            kinds = {type(node) for node in ast.walk(ast.parse(path.read_text()))}
            assert ast.Assert not in kinds, path


def test_no_path_of_a_machine_is_left():
    """Fails if a committed file names a folder of the machine it was made on."""
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".sh", ".ipynb"}
    for path in repository_files():
        if path.suffix in kinds and path.name != "test_repo.py":
            found = re.search(r"(?<![\w.])/(root|work|home|farm|opt|tmp)/\w+", path.read_text())
            assert not found, f"{path}: {found}"

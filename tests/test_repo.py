"""The pages say what is true, and imports go one way."""

import importlib
import inspect
import re
import subprocess
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
RELATED = [path for path in ROOT.glob("related/*.py") if path.stem != "__init__"]
LOG = ROOT / "runs" / "LOG.md"  # its flags and commands are those of their day

OTHER_FLAGS = {  # of torchrun, pip, jupyter and TRL
    "--standalone", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--help",
    "--shutdown-timeout", "--signals-to-handle", "--no-deps", "--config", "--max-restarts",
    "--inplace", "--no-index", "--only-binary", "--find-links",
}  # fmt: skip

# What the modules of a folder may import of ours: folders, and modules of the root.
MAY_IMPORT = {
    "engines": {"engines", "runtime", "dppo", "lora", "rollout", "packing"},
    "integrations": {"dppo"},  # and links there: pip installs no others
    "runtime": {"runtime"},
}
NOBODY_IMPORTS = {"related", "bench"}  # but themselves; rules of related are found by name


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

    related = [importlib.import_module(f"related.{path.stem}") for path in RELATED]
    programs = [module.main for module in related if hasattr(module, "main")]
    for program in [*bench.__main__.COMMANDS.values(), *programs]:
        names |= set(inspect.signature(program).parameters)

    flags = {config.flag(name) for name in names}
    for script in ROOT.glob("runs/*.sh"):  # the labels of its `case`
        flags |= set(re.findall(r"^ *(--[a-z0-9-]+)\)", script.read_text(), re.MULTILINE))
    return flags | {"--json"} | OTHER_FLAGS  # --json is the parameter json_file


@page_parameter([*PAGES, *sorted(ROOT.glob("runs/*.sh"))])
def test_flags_exist(path):
    """Fails if a page or a script names a flag that no program has, say after a rename."""
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


# ---------------------------------------------------------------------------- files


def test_layers():
    """Fails if a folder imports what it may not."""
    ours = {path.stem for path in ROOT.glob("*") if path.name != "tests"}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        folder = path.relative_to(ROOT).parts[0]  # or a file of the root
        if folder in ("tests", *NOBODY_IMPORTS) or path.is_symlink():
            continue
        found = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE)
        assert ours & {*found} <= MAY_IMPORT.get(folder, ours - NOBODY_IMPORTS), path


def test_no_path_of_a_machine_is_left():
    """Fails if a committed file names a folder of the machine it was made on."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".sh", ".ipynb"}
    for path in map(ROOT.joinpath, listed.stdout.splitlines()):
        if path.suffix in kinds and path.exists() and path.name != "test_repo.py":
            found = re.search(r"(?<![\w.])/(root|work|home|farm|opt|tmp)/\w+", path.read_text())
            assert not found, f"{path}: {found}"

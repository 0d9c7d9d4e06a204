"""The README says what is true: its flags exist, its paths exist, and nothing of the machine it was made on is left."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import config
import eval as evaluation

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def tracked():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def flags_of(kind):
    return {f"--{field.name.replace('_', '-')}" for field in fields(kind)}


def test_readme_flags_exist():
    """Kills: a renamed flag."""
    others = {
        "--help",
        "--standalone",
        "--nproc-per-node",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rounds",
        "--methods",
        "--json",
        "--level",
        "--seeds",
        "--durations",
        "--shape",
    }
    known = flags_of(config.Config) | flags_of(evaluation.EvalConfig) | others
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known


def test_readme_explains_every_flag_of_train():
    assert flags_of(config.Config) <= set(re.findall(r"--[a-z][a-z-]+", README))


def test_readme_paths_exist():
    """Every linked file, and every file named in the file table. Kills: a figure that was never made."""
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", README)
    assert len(links) > 8
    for link in links:
        assert (ROOT / link).exists(), link


def test_readme_commands_come_first():
    assert "torchrun train.py" in README
    assert "pip install -r requirements.txt && pytest" in README
    head = "\n".join(README.splitlines()[:8])
    assert "2603.04135" in head
    assert "Divergence" in head, "which DPPO this is, and is not, is said at once"


def test_no_path_of_a_machine_is_left():
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".sh"} and path.name != "test_repo.py":
            text = path.read_text()
            found = re.search(r"(?<![\w.])/(root|work|home|farm|opt|tmp)/\w+", text)
            assert not found, f"{path}: {found}"


def test_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_file_table_counts():
    """Lines as the README's file table has them, to within a few. Kills: a table that is not kept."""
    table = re.findall(r"\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", README)
    assert {name for name, _ in table} == {path.name for path in ROOT.glob("*.py")}
    for name, count in table:
        assert abs(len((ROOT / name).read_text().splitlines()) - int(count)) <= 8, name

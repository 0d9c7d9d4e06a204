"""
Which code made a record of runs/: `python -m bench code`.

A record's first row (or the table itself) has the commit that was checked out, and a hash of the
reading path's syntax trees. The hash leaves out comments, docstrings and layout. docs/records.md
lists all records, and a notebook that reads one with `read` says if other code made it.
"""

import ast
import functools
import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READING_PATH = ("dppo", "sampler", "packing", "rollout", "update", "train")
PAGE = ROOT / "docs" / "records.md"
TODAYS = "today's"


def main(write: bool = False, keep: tuple[Path, Path] | None = None) -> None:
    """List the records of runs/ with the code that made each.

    Args:
        write: also write the list to docs/records.md
        keep: copy the log.jsonl of a run, which today's code has made, to a record
    """
    if keep:
        log, record = keep
        first, *rest = log.read_text().splitlines()
        first = json.dumps(json.loads(first) | this_code())
        record.write_text("\n".join([first, *rest]) + "\n")
    listed = table()
    print(listed)
    if write:
        head = PAGE.read_text().split("| record |")[0]
        PAGE.write_text(head + listed + "\n")


def table() -> str:
    """A markdown table of the records in runs/: file, commit, and whose code it was."""
    today = this_code()["code_hash"]
    lines = ["| record | commit | code |", "|---|---|---|"]
    for path in sorted((ROOT / "runs").glob("*.json*")):
        found = of_record(path)
        made_by = TODAYS if found.get("code_hash") == today else "older"
        link = f"[{path.name}](../runs/{path.name})"
        lines.append(f"| {link} | {found.get('commit', 'unknown')} | {made_by} |")
    return "\n".join(lines)


@functools.cache
def code_hash(*sources: str) -> str:
    """A hash of Python files' syntax trees without docstrings."""
    digest = hashlib.sha256()
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:12]


def _is_text(node) -> bool:
    """Whether a statement is a string alone, as docstrings are."""
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(getattr(value, "value", None), str)


def this_code() -> dict[str, str]:
    """{commit, code_hash}: the commit that is checked out, and the hash of the reading path now."""
    sources = [(ROOT / f"{name}.py").read_text() for name in READING_PATH]
    return {"commit": _commit(), "code_hash": code_hash(*sources)}


@functools.cache
def _commit() -> str:
    """The commit that was checked out when the process first asked; unknown without git."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stamped(content):
    """A record's table or rows, with the code that made them: in the table, or in its first row."""
    if isinstance(content, dict):
        return content | this_code()
    first, *rest = content
    return [first | this_code(), *rest]


def of_record(path: Path) -> dict:
    """The first row, or the table, of a record."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return json.loads(text.split("\n", 1)[0] or "{}")
    content = json.loads(text)
    return content if isinstance(content, dict) else content[0]


def read(path: str | Path):
    """The content of a record, for a notebook; prints a note if other code than today's made it."""
    path = ROOT / path
    found = of_record(path)
    if found.get("code_hash") != this_code()["code_hash"]:
        commit = found.get("commit", "unknown")
        print(f"note: {path.name} was made by older code, that of commit {commit}")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(path.read_text())

"""Records know the code that made them, and pages say which records are of older code."""

import re

import pytest
from test_repo import ROOT, page

from bench import code, write_json

SOURCE = """
def double(x):
    return 2 * x  # twice
"""


@pytest.mark.parametrize(
    ("source", "same"),
    [
        (SOURCE.replace("# twice", "# a comment"), True),
        (SOURCE.replace("return", '"""Twice x."""\n    return'), True),
        ('"""A module."""\n' + SOURCE.replace("2 * x", "(2 *\n        x)"), True),
        (SOURCE.replace("2 * x", "3 * x"), False),
        (SOURCE.replace("2 * x", '"2" * x'), False),
        (SOURCE + "double(1)", False),
    ],
)
def test_the_hash_is_of_what_code_does(source, same):
    """Fails if a comment, a docstring or layout counts as other code, or if other code does not."""
    assert (code.code_hash(source) == code.code_hash(SOURCE)) == same
    assert code.code_hash(SOURCE, source) != code.code_hash(source)


@pytest.mark.parametrize("content", [[{"a": 1}, {"b": 2}], {"rows": [1]}])
def test_a_record_knows_its_code(tmp_path, monkeypatch, capsys, content):
    """Fails if a bench writes a record without its code, if a reader is not told that the code has
    changed, or is told although it has not."""
    path = tmp_path / "record.json"
    write_json(path, content)
    found = code.of_record(path)
    assert re.fullmatch("[0-9a-f]{7,}|unknown", found["commit"])
    assert code.read(path) == code.stamped(content)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(code, "READING_PATH", ("minimal",))
    code.read(path)
    assert capsys.readouterr().out == (
        f"note: record.json was made by older code, that of commit {found['commit']}\n"
    )


def test_a_kept_log_knows_its_code(tmp_path, capsys):
    """Fails if a log that becomes a record loses a row, or does not get its code."""
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n{"step": 1, "loss": 2.0}\n')
    code.main(keep=(tmp_path / "log.jsonl", tmp_path / "record.jsonl"))
    capsys.readouterr()
    rows = code.read(tmp_path / "record.jsonl")
    assert rows == [{"step": 0} | code.this_code(), {"step": 1, "loss": 2.0}]
    assert capsys.readouterr().out == "", "it is of today's code"


def test_the_page_of_records_is_true():
    """Fails if a record is missing in docs/records.md, or is called today's although the code has
    changed since: then run `python -m bench code --write`."""
    assert code.PAGE.read_text().endswith(code.table() + "\n"), "python -m bench code --write"
    for path in (ROOT / "runs").glob("*.json*"):
        assert {"commit", "code_hash"} <= code.of_record(path).keys(), path.name


@page
def test_pages_say_which_code_made_their_records(path):
    """Fails if a page shows a record, but does not say where its code is told."""
    text = path.read_text()
    shows = re.search(r"\]\((\.\./)?runs/[\w-]+\.jsonl?\)", text)
    assert not shows or "records.md" in text or path == code.PAGE

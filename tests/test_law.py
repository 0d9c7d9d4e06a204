"""P^2 Law (related/law.py) against its equation, and what it predicts of the stored rows."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from related import law

KNOWN = law.Law(N_C=0.3, D_C=0.5, E=0.1, alpha=0.7, beta=0.4, gamma=-1.2, delta=0.2)


def grid(constants):
    """Rows that follow the law exactly: 3 sizes, 3 rates, 5 token counts."""
    sizes, rates, tokens = [0.2, 0.6, 1.5], [0.25, 0.375, 0.5], [0.2, 0.4, 0.8, 1.6, 3.2]
    columns = zip(*itertools.product(sizes, rates, tokens), strict=True)
    size, rate, tokens = (torch.tensor(column, dtype=torch.float64) for column in columns)
    rows = law.Rows(size, tokens, rate, 0.3 / size, torch.zeros_like(size))
    return rows._replace(loss=constants.predict(rows))


def test_the_equation():
    """Fails if a term, a sign of an exponent or a factor differs from the paper's form."""
    one = lambda value: torch.tensor([value], dtype=torch.float64)
    rows = law.Rows(one(2.0), one(8.0), one(0.5), one(1.0), one(0.0))
    constants = law.Law(N_C=3.0, D_C=5.0, E=0.1, alpha=1.0, beta=1 / 3, gamma=-1.0, delta=2.0)
    # (1/0.5)^-1 (1/2)^2 (3/2 + 5/8^(1/3) + 0.1)
    torch.testing.assert_close(constants.predict(rows), one(1 + 0.5 * 0.25 * (1.5 + 2.5 + 0.1)))


@pytest.mark.parametrize("held_out", ["size", "rate", "tokens"])
def test_a_law_is_found_again(held_out):
    """Fails if the fit stops early, or if one loss that is far off bends it, as with squares."""
    rows = grid(KNOWN)
    column = getattr(rows, held_out)
    tested = column == column.max()
    fitted = rows.where(~tested)
    fitted.loss[7] += 3.0
    found = law.fit(fitted)
    excess = (rows.loss - rows.whole)[tested]
    off = (found.predict(rows)[tested] - rows.loss[tested]).abs()
    assert (off / excess).max() < 0.1


def test_errors_by_hand():
    """Fails if a slope crosses from one run to another, or is not per doubling."""
    tokens = torch.tensor([4.0, 1.0, 1.0, 4.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    loss = torch.tensor([1.0, 3.0, 2.0, 2.5], dtype=torch.float64)
    rows = law.Rows(ones, tokens, ones, torch.zeros_like(ones), loss)
    flat = law.Law(N_C=1.0, D_C=0.0, E=1.0, alpha=1.0, beta=1.0, gamma=1.0, delta=1.0)  # 2 always
    found = law.errors(flat, rows, torch.tensor([0, 0, 1, 1]))
    assert found["mean_error"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    # From 1 to 4 tokens are two doublings: run 0 falls by 1 each, run 1 rises by 0.25.
    assert found["asd"] == pytest.approx((1 + 0.25) / 2)
    spread = sum((one - 2.125) ** 2 for one in loss.tolist())
    assert found["r2"] == pytest.approx(1 - (1 + 1 + 0.25) / spread)


def test_held_out_rows(monkeypatch, capsys):
    """The law is fitted without the rows that it predicts, of each method alone. Catches a fit to
    all, and slopes that begin at rows that were held out."""
    monkeypatch.setattr(law, "STARTS", 4)
    law.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    counts = {"none": ["54", "54"], "size": ["36", "18"], "rate": ["36", "18"]}
    counts["tokens"] = ["45", "9"]
    assert [line[:4] for line in lines] == [
        [method, name, *counts[name]] for method in ("2ssp", "l2") for name in counts
    ]
    own = [row for row in json.loads(law.ROWS.read_text())["rows"] if row["method"] == "l2"]
    fitted = law.fit(law.as_rows([row for row in own if row["step"] < 192]))
    longest = law.as_rows([row for row in own if row["step"] == 192])
    error = (fitted.predict(longest) - longest.loss).abs().mean().item()
    assert lines[-1][4] == f"{error:.4f}"
    assert float(lines[-1][6]) > 0


def test_the_page():
    """docs/other-prunings.md has the errors of the committed fits, of which the first is made
    again. Catches a figure that outlived its rows."""
    stored = json.loads(law.ROWS.read_text())
    page = Path("docs/other-prunings.md").read_text()
    for name, method in (("2SSP", "2ssp"), ("relative L2", "l2")):
        errors = [one["mean_error"] for one in stored["fits"] if one["method"] == method]
        assert f"| {name} | {' | '.join(f'{error:.3f}' for error in errors)} |" in page
    measured = law.as_rows([row for row in stored["rows"] if row["method"] == "2ssp"])
    found = law.fit(measured)
    error = (found.predict(measured) - measured.loss).abs().mean().item()
    assert error == pytest.approx(stored["fits"][0]["mean_error"], rel=1e-3)

"""P^2 Law (related/law.py) against its equation, and what it predicts of the stored rows."""

import json
from pathlib import Path

import pytest
import torch

from related import law


def test_the_equation():
    """Fails if a term, a sign of an exponent or a factor differs from the paper's form."""
    one = lambda value: torch.tensor([value], dtype=torch.float64)
    rows = law.Rows(one(2.0), one(8.0), one(0.5), one(1.0), one(0.0))
    constants = law.Law(N_C=3.0, D_C=5.0, E=0.1, alpha=1.0, beta=1 / 3, gamma=-1.0, delta=2.0)
    # (1/0.5)^-1 (1/2)^2 (3/2 + 5/8^(1/3) + 0.1)
    torch.testing.assert_close(constants.predict(rows), one(1 + 0.5 * 0.25 * (1.5 + 2.5 + 0.1)))


def test_what_is_held_out(monkeypatch, capsys):
    """Of each method alone, the largest size, the highest rate and the last measurements. Catches a
    fit to what it then predicts, and a prediction of other rows."""
    fitted, predicted = [], []

    class Known(law.Law):
        def predict(self, rows):
            predicted.append(len(rows.size))
            return rows.loss + 0.25

    def see_fit(rows):
        fitted.append(len(rows.size))
        return Known(*range(7))

    monkeypatch.setattr(law, "fit", see_fit)
    law.main()
    assert fitted == [54, 36, 36, 45] * 2
    assert predicted == [54, 18, 18, 9] * 2
    assert capsys.readouterr().out.splitlines()[1].split() == ["2ssp", *["0.250"] * 4]


def test_the_page():
    """docs/other-prunings.md has the errors of the committed fits, of which the first is made
    again. Catches a figure that outlived its rows."""
    stored = json.loads(law.ROWS.read_text())
    page = Path("docs/other-prunings.md").read_text()
    errors = {method: [] for method in ("2ssp", "l2")}
    for one in stored["fits"]:
        errors[one["method"]].append(f"{one['mean_error']:.3f}")
    _, size, rate, tokens = errors["2ssp"]
    of_2ssp = f"{size} nats on the largest model, {rate} at the highest rate and {tokens} on the"
    assert of_2ssp in " ".join(page.split())
    assert "relative L2: {1}, {2} and {3};".format(*errors["l2"]) in page
    measured = law.as_rows([row for row in stored["rows"] if row["method"] == "2ssp"])
    error = (law.fit(measured).predict(measured) - measured.loss).abs().mean().item()
    assert error == pytest.approx(stored["fits"][0]["mean_error"], rel=1e-3)

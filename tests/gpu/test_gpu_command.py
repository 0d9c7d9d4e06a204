"""`python -m bench gpu` on a toy model. Needs CUDA, or tests/gpu/conftest.py's stand-in for it."""

import contextlib
import json
import re
import time
import types

import pretend_cuda
import pytest
import torch

import packing
from bench import gpu, gpu_sections

KERNELS = ("flash_attn_varlen_func", "varlen_attn")
EXPECTED = ("not installed", "the profiler recorded no kernel", "Legacy CUDA profiling")
NAMES = [name for name in gpu.SECTIONS if name != "tests"]


def tables(page):
    """{section: rows of cells}, the header's first."""
    parts = page.split("\n## ")[1:]
    rows = lambda part: [line for line in part.splitlines() if line.startswith("| ")]
    split = lambda part: [row.strip("| ").split(" | ") for row in rows(part)]
    return {part.splitlines()[0]: split(part) for part in parts}


def test_every_section(tmp_path, monkeypatch, pretend):
    """Real measurements, then three made-up ones. Catches a section that the code has outgrown, a
    failure that stops the others or leaves no trace, a time limit that is not kept, a share upside
    down, and columns of the page that no row has."""
    if pretend:
        for kernel in KERNELS:
            monkeypatch.setattr(packing, kernel, getattr(pretend_cuda, kernel))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    files = {"json_file": tmp_path / "rows.json", "page": tmp_path / "page.md"}
    gpu.main(tiny=True, only=NAMES, **files)
    rows = json.loads(files["json_file"].read_text())["sections"]
    assert list(rows) == NAMES
    for name, found in rows.items():
        assert found
        for row in found:
            reason = row.get("error", row.get("skipped"))
            assert reason is None or any(some in reason for some in EXPECTED), (name, row)
    good = {
        name: [row for row in rows[name] if not {"error", "skipped"} & row.keys()] for name in rows
    }
    for name in ("machine", "gap", "rollouts", "updates", "steps"):
        assert good[name], name
        assert all(column in good[name][0] for column in gpu.SECTIONS[name].columns.split(" | "))
    for row in good["attention"]:
        errors = [row[name] for name in ("values", "q", "k", "v")]
        assert all(0 <= own < 5 * masked < 0.1 for own, masked in errors)
    assert all(0 <= row["mean gap"] <= row["largest gap"] < 0.1 for row in good["gap"])
    assert [row["loss"] for row in good["gap"]] == ["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
    for row in good["rollouts"] + good["updates"]:
        seconds, least, share = row["seconds, roofline, share"]
        assert 0 < least < seconds
        assert share == pytest.approx(least / seconds)
    measured, computed = good["updates"][0]["state GiB, computed"]
    workspaces = 0.0 if pretend else 0.5  # cuBLAS's
    assert 0.95 * computed < measured < 1.05 * computed + workspaces
    assert good["updates"][0]["peak GiB, computed"][0] > computed
    grpo, pps = (row["tokens generated, trained"] for row in good["steps"])
    assert 0 <= pps[1] < grpo[1], "0 if both groups of this tiny step are dead"
    shown = tables(files["page"].read_text())
    assert list(shown) == NAMES
    for name, found in rows.items():
        assert all(len(cells) <= 6 for cells in shown[name])
        assert len(shown[name]) == 1 + len(found)


def test_failures_and_limits(tmp_path, monkeypatch):
    """Made-up measurements. Catches an error that stops the command or that the page does not show,
    a path of the machine in a message, and a time limit that is not kept, before a measurement or
    during it."""

    def broken():
        raise torch.OutOfMemoryError("see /var/some/log.txt | 80 GiB\nmore")

    def endless():
        started = time.monotonic()
        while time.monotonic() < started + 9:
            pass
        return {"tokens/s": 9.0}

    def made_up(_bench):
        yield {"shape": "a"}, broken
        yield {"shape": "b"}, lambda: [{"tokens/s": 1234.0}, {"tokens/s": 2.0}]
        yield {"shape": "c"}, endless
        yield {"shape": "d"}, lambda: {"tokens/s": 3.0}

    sections = {"updates": gpu.SECTIONS["updates"]._replace(measurements=made_up)}
    machine, sections["gap"] = gpu.SECTIONS["machine"], gpu.SECTIONS["gap"]
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    files = {"json_file": tmp_path / "rows.json", "page": tmp_path / "page.md"}
    gpu.main(tiny=True, minutes=0.06, **files)  # 3.6 s: a and b take 0.6 each on a busy machine
    found = json.loads(files["json_file"].read_text())["sections"]
    assert [row["shape"] for row in found["updates"]] == ["a", "b", "b", "c", "d"]
    reasons = [row.get("error", row.get("skipped")) for row in found["updates"]]
    assert reasons[0] == "OutOfMemoryError: see log.txt | 80 GiB"
    assert reasons[1:3] == [None, None]
    assert reasons[3] == "OutOfTime: the time of --minutes is over"
    assert reasons[4] == "needs about 0 s, and --minutes leaves 0 s"
    assert {row["skipped"] for row in found["gap"]} == {reasons[4]}
    lines = tables(files["page"].read_text())["updates"]
    shown = ["OutOfMemoryError: see log.txt / 80 GiB", "1,234", "2"]
    assert [cells[1] for cells in lines[1:4]] == shown
    sections["machine"] = machine
    gpu.main(minutes=0, only=("machine", "gap"), **files)
    found = json.loads(files["json_file"].read_text())["sections"]
    assert found["machine"][0]["value"] == torch.cuda.get_device_name()
    assert {row["skipped"] for row in found["gap"]} == {
        "needs about 10 s, and --minutes leaves 0 s"
    }
    sections["updates"] = sections["updates"]._replace(seconds=70)
    gpu.main(minutes=1, only=("updates",), **files)
    found = json.loads(files["json_file"].read_text())["sections"]
    assert {row["skipped"] for row in found["updates"]} == {
        "needs about 70 s, and --minutes leaves 60 s"
    }


def test_kernels(monkeypatch):
    """On a made-up profile. Catches time on the host or of a range that counts as a kernel's, the
    wrong order, and a busy share upside down."""

    def event(key, device, count, microseconds, is_range=False):
        device = types.SimpleNamespace(name=device)
        words = {"key": key, "device_type": device, "is_user_annotation": is_range}
        return types.SimpleNamespace(**words, count=count, self_device_time_total=microseconds)

    small = [event(f"small {number}", "CUDA", 1, 1.0) for number in range(20)]
    events = [*small, event("gemm", "CUDA", 6, 980.0), event("aten::mm", "CPU", 6, 980.0)]
    events.append(event("step", "CUDA", 1, 980.0, is_range=True))
    profile = types.SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext(profile))
    times = iter((5.0, 5.004))
    monkeypatch.setattr(gpu_sections, "clock", lambda _device: next(times))
    done = []
    rows = gpu_sections.kernels(lambda: done.append(1), 2)
    assert len(done) == 3, "warm, timed, profiled"
    assert rows[0] == pytest.approx(
        {"kernel": "all", "launches each": 13, "device ms": 1, "of device time": 1, "busy": 0.25}
    )
    wanted = {"kernel": "gemm", "launches each": 3, "device ms": 0.98, "of device time": 0.98}
    assert rows[1] == pytest.approx(wanted)
    assert len(rows) == 16
    events[:] = []
    times = iter((5.0, 5.004))
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        gpu_sections.kernels(lambda: None, 2)


def test_wrong_input(monkeypatch):
    """Catches a run that skips a section because of a typing error, and one without CUDA."""
    with pytest.raises(gpu.InputError, match="--only gpa: choose from machine tests"):
        gpu.main(only=("gpa", "gap"), minutes=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gpu.InputError, match="no CUDA device"):
        gpu.main(minutes=0)


def test_the_tests(tmp_path, monkeypatch):
    """The section that runs tests/gpu, on a folder of four tests. Catches counts under the wrong
    word, an error that counts as nothing, and a run that is not ended."""
    monkeypatch.setattr(gpu_sections, "ROOT", tmp_path)
    with pytest.raises(gpu_sections.Skipped, match="no tests/gpu"):
        gpu_sections.run_tests()
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    code = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(x): pass\n"
    code += "@pytest.mark.skip\ndef test_d(): pass\n"
    (folder / "test_x.py").write_text(code)
    row = gpu_sections.run_tests()
    assert (row["passed"], row["failed"], row["not run"]) == (1, 2, 1)
    assert re.match("2 failed|1 failed, 1 passed", row["ending"])
    (folder / "test_x.py").write_text("import time\nprint('begun')\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu_sections, "TEST_SECONDS", 3)
    row = gpu_sections.run_tests()
    assert row["ending"] == "stopped after 3 s"
    assert row["seconds"] < 8

"""
What goes wrong, on purpose: answers that are made to hang or crash the judge, and runs that are killed. bench.py's
`hostile` and `kills`.
"""

import concurrent.futures
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import tyro
from safetensors.torch import load_file

import arithmetic
import checkpoint
import rewards

# ---------------------------------------------------------------------------- answers that mean harm


def hostile_answers() -> list[tuple[str, str]]:
    """A hundred (completion, gold) made to hang, fill the memory of or crash whoever compares them; all wrong."""
    tower = lambda base, height: "^{".join([base] * height) + "}" * (height - 1)
    nested = lambda word, depth: word * depth + "2" + "}" * depth
    answers = [tower(base, height) for base in ("10", "9", "99", "2", "x", "1.5") for height in (3, 4, 5, 9, 40)]  # 30
    answers += [f"{n}!" for n in (10**5, 10**6, 10**8, 10**20)] + ["3" + "!" * n for n in (3, 5, 9, 30)]
    answers += [
        f"{function}{{10^{{10^{{10}}}}}}" for function in ("\\sqrt", "\\sin", "\\log", "\\cos", "\\ln", "\\exp")
    ]
    answers += [f"\\frac{{{tower('7', n)}}}{{{tower('5', n)}}}" for n in (4, 6)] + ["-" * n + "2" for n in (500, 1900)]
    answers += [f"\\{word}_{{i=1}}^{{10^{{{n}}}}} i^{{i}}" for word in ("sum", "prod") for n in (6, 12, 100)]
    answers += [f"\\binom{{10^{{{n}}}}}{{10^{{{n - 1}}}}}" for n in (5, 9, 20)]
    answers += [f"\\int_0^{{{n}}} e^{{x^{{x^x}}}} \\sin(x^{n}) dx" for n in (1, 7)]
    answers += [nested(word, n) for word in ("\\sqrt{", "\\frac{1}{1+", "{", "\\text{") for n in (50, 150)]
    answers += ["(" * n + "2" + ")" * n for n in (100, 900)] + ["|" * n + "2" + "|" * n for n in (100, 900)]
    answers += [
        "x=" + tower("10", 4),
        "x>" + tower("10", 4),
        f"({tower('10', 4)}, \\infty)",
        f"\\{{1, {tower('9', 4)}\\}}",
    ]
    answers += [
        "9" * 1900,
        "0." + "1" * 1900,
        "1," * 900,
        "+".join("abcdefgh" * 100),
        "x^" * 900 + "2",
        "1/" * 900 + "0",
    ]
    answers += ["(x+1)^{10^5}", "(a+b+c+d+e)^{300}", "10^{-10^{10^{10}}}", "0^{0^{0}}", "1/0", "\\infty", "\\text{nan}"]
    answers += [
        "\\begin{pmatrix}" + " \\\\ ".join([" & ".join("9" * 20)] * 20) + "\\end{pmatrix}",
        "",
        " ",
        "\0",
        "\\",
        "}",
    ]
    answers += ["\ud7ff" * 900, "٣", "³", "\\boxed{}", "import os", "__import__('os').abort()", "lambda: 0", "%" * 900]
    texts = [f"\\boxed{{{answer}}}" for answer in answers] + ["\\boxed{" + "{" * 10**7, "\\boxed{" * 10**6, "}" * 10**7]
    texts += [
        "\\boxed{" + "{" * 10**7 + "}" * 10**7 + "}",
        "<think>" * 10**6 + "\\boxed{7}",
        "\\boxed{" + "7" * 10**7 + "}",
    ]
    golds = ("7", "\\frac{1}{7}", "x^{7}+1", "(1, 7)")
    return [(text, golds[number % len(golds)]) for number, text in enumerate(texts)]


def hostile(json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None) -> None:
    """Score every hostile completion, from the main thread and from another one, and say what it took.

    Args:
        json_file: where to write the rows {completion, gold, thread, reward, seconds}, and the peak memory
    """
    rows = []
    rewards.math_reward("\\boxed{\\frac{1}{2}}", "0.5")  # the judge's start is not theirs
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for thread, (completion, gold) in itertools.product((False, True), hostile_answers()):
            rewards.ask.cache_clear()
            started = time.perf_counter()
            reward = (
                pool.submit(rewards.math_reward, completion, gold).result()
                if thread
                else rewards.math_reward(completion, gold)
            )
            rows.append({"completion": completion[:60], "gold": gold, "thread": thread, "reward": reward,
                         "seconds": time.perf_counter() - started})  # fmt: skip
    alive = rewards.math_reward("\\boxed{\\frac{2}{4}}", "0.5") == 1.0
    rewards._judge.stdin.close()
    rewards._judge.wait()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # GiB, of the judge and who worked for it
    seconds = [row["seconds"] for row in rows]
    summary = {"answers": len(rows), "not 0": sum(row["reward"] != 0 for row in rows), "slowest_s": max(seconds),
               "above_2_s": sum(spent > 2 for spent in seconds), "peak_gib": peak, "judge_works": alive}  # fmt: skip
    print(json.dumps(summary))
    if json_file:
        json_file.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


# ---------------------------------------------------------------------------- kill -9


def kills(
    count: int = 20,
    steps: int = 90,
    seed: int = 0,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Kill a run of the embedded task at random moments, resume it each time, and compare it with one left alone.

    Args:
        count: kills
        steps: of the run, which saves every third
        seed: of the moments, 3 to 13 s after the start of Python, of which it needs some 5 to take its first step
        json_file: where to write the rows {killed, after_s, logged, resumed_from}
    """
    arithmetic.base_folder()
    rng, table = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")

        def command(out_dir, *more):
            words = ["--steps", str(steps), "--save-every", "3", "--eval-every", "10", "--eval-problems", "60"]
            return [sys.executable, "train.py", "--method", "pps", "--out-dir", str(out_dir), *words, *more]

        def logged():
            rows = checkpoint.read_rows(killed / "log.jsonl")
            return rows[-1]["step"] if rows else 0

        subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
        while sum(row["killed"] for row in table) < count:
            before = sorted(killed.glob("checkpoint-*"))
            process = subprocess.Popen(command(killed, "--resume"), stdout=subprocess.DEVNULL)
            wait = rng.uniform(3, 13)
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                process.kill()
            finished = process.wait() == 0
            table.append({"killed": not finished, "after_s": wait, "logged": logged(),
                          "resumed_from": int(before[-1].name[-6:]) if before else 0})  # fmt: skip
            print(json.dumps(table[-1]), flush=True)
            if finished:  # it got to its end: the other kills are of another run
                compare(whole, killed, steps)
                killed = Path(folder, f"killed{len(table)}")
        subprocess.run(command(killed, "--resume"), check=True, stdout=subprocess.DEVNULL)
        compare(whole, killed, steps)
    print(f"{count} kills, each resumed: logs, samples and weights are those of the run that was left alone")
    if json_file:
        json_file.write_text(json.dumps(table, indent=1) + "\n")


def compare(one: Path, other: Path, steps: int) -> None:
    """AssertionError unless two runs left the same log (times apart), samples and weights."""
    for name in ("log.jsonl", "samples.jsonl"):
        logs = [
            [
                {key: row[key] for key in row if not key.startswith(("time/", "step_time"))}
                for row in checkpoint.read_rows(run / name)
            ]
            for run in (one, other)
        ]
        assert logs[0] == logs[1], name
        assert logs[0][-1]["step"] == steps
    weights = [load_file(run / "checkpoint" / "model.safetensors") for run in (one, other)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])

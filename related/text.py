"""
Text to calibrate a pruning on, and text to judge it by: what there is without a model hub.

    python-docs     Python's own reference, 0.4 MB of technical English that comes with Python
    a .txt or .md file
    words, gsm8k, math, a file of problems: problems with worked solutions, as sft.py sees them
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

from runtime import InputError
from tasks import sft


def read(name: str, tokenizer, samples: int, length: int) -> torch.Tensor:
    """[2, samples, length] tokens: windows spread over the first nine tenths of a text, to
    calibrate on, and over its last tenth, held out."""
    if name == "python-docs":
        paragraphs = "\n\n".join(topics[key] for key in sorted(topics)).split("\n\n")
        tokens = tokenizer("\n\n".join(dict.fromkeys(paragraphs)))["input_ids"]  # none twice
    elif name.endswith((".txt", ".md")) and Path(name).is_file():
        tokens = tokenizer(Path(name).read_text(encoding="utf-8"))["input_ids"]
    else:
        pairs = sft.encode(sft.Config(data=(name,), batch_size=1), tokenizer, sys.maxsize)
        tokens = [token for pair in pairs for ids in pair for token in ids]
    last, windows = len(tokens) * 9 // 10, []
    if samples < 1 or length < 2 or len(tokens) - last < samples * length:
        most = f"{len(tokens) - last} tokens of {name} are held out"
        raise InputError(f"--samples {samples} of --tokens {length}, at least 1 of 2: {most}")
    for part in (tokens[:last], tokens[last:]):
        starts = [k * len(part) // samples for k in range(samples)]
        windows.append(torch.tensor([part[start : start + length] for start in starts]))
    return torch.stack(windows)

"""The mean of several checkpoints of one shape: average.py OUT DIR DIR …

The mean of runs that continue from one another is better than the last of them when that one was short: each has faults of
its own, and they cancel.
"""

import argparse
import os
import shutil

import torch

import model


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", help="the checkpoint's folder")
    ap.add_argument("checkpoints", nargs="+", help="folders that train.py or export.py --gguf wrote")
    a = ap.parse_args()
    shape = model.Shape()
    parts = [model.load(shape, folder) for folder in a.checkpoints]
    mean = {key: torch.stack([p[key] for p in parts]).mean(0) for key in parts[0]}
    os.makedirs(a.out, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(os.path.join(a.checkpoints[0], name), a.out)
    model.save(shape, mean, a.out)


if __name__ == "__main__":
    main()

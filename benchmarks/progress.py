"""How runs learned: mean test accuracy of the ten rounds before 20, 40, …, and the final cost.

python benchmarks/progress.py runs/fedavg runs/feddu …
"""

import sys
from pathlib import Path

from feddumap.runs.reader import read_config, read_records

MARKS = (20, 40, 60, 80, 100)


def main() -> None:
    print(
        "| run |",
        " | ".join(f"{mark - 10}-{mark - 1}" for mark in MARKS),
        "| multiply-adds | parameters | clock |",
    )
    print("|---" * (len(MARKS) + 4) + "|")
    for path in map(Path, sys.argv[1:]):
        records = read_records(path)
        accuracies = [record["accuracy"] for record in records]
        means = [
            f"{sum(accuracies[mark - 10 : mark]) / 10:.3f}" if len(accuracies) >= mark else "-"
            for mark in MARKS
        ]
        last, method = records[-1], read_config(path).method.name
        cost = f"{last['macs']:,} | {last['parameters']:,} | {last['clock']:.0f} s"
        print(f"| {method} | {' | '.join(means)} | {cost} |")


if __name__ == "__main__":
    main()

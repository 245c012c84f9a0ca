"""`feddumap inspect run`: accuracy, costs and prunings of a run, read from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from feddumap.attacks import hostile_devices
from feddumap.errors import FeddumapError
from feddumap.runs import privacy
from feddumap.runs.reader import read_config, read_records
from feddumap.runs.screened import screened_devices
from feddumap.runs.summary import accuracies, device_accuracy, evaluated, finished
from feddumap.system import console
from feddumap.system.console import byte_size, duration, percent, plural, span

POINTS = 10
SKIPPED = {"negligible": "α was at most 0.001", "exploded": "the server's loss exploded"}
SHARES = {"accuracy", "server_accuracy", "backdoor", "devices_mean", "devices_worst_tenth"}


def describe(path: Path) -> dict[str, Any]:
    """The statistics of a run, which may be in progress."""
    config = read_config(path)
    records = read_records(path)
    if not records:
        raise FeddumapError(f"{path} has no finished round yet: wait for the first, or resume the run")
    done = finished(path)
    return {
        "run": str(path),
        "method": config.method.model_dump(),
        "model": config.model.name,
        "data": config.data.name,
        "kernels": config.train.kernels,
        "rounds": len(records),
        "of": len(records) if done else config.train.rounds,
        "finished": done,
        "accuracy": accuracies(records),
        "device_accuracy": device_accuracy(records),
        "privacy": privacy.describe(config, records),
        "clock": records[-1]["clock"],
        "wall": records[-1]["wall"],
        "bytes_down": sum(record["bytes_down"] for record in records),
        "bytes_up": sum(record["bytes_up"] for record in records),
        "parameters": records[-1]["parameters"],
        "macs": records[-1]["macs"],
        "prunings": [
            {
                "round": record["round"],
                **record["pruning"],
                "round_seconds": _change(records, record["round"]),
            }
            for record in records
            if "pruning" in record
        ],
        "left_out": {
            what: sum(len(record.get(what, [])) for record in records) for what in ("dropped", "rejected")
        },
        "dominant": [
            {"round": record["round"], **record["dominant"]} for record in records if "dominant" in record
        ],
        "lost": [
            {"round": record["round"], "device": int(device), "reason": reason}
            for record in records
            for device, reason in record.get("lost", {}).items()
        ],
        "defence": {
            "rule": config.aggregate.name,
            "devices": [asdict(device) for device in screened_devices(records, hostile_devices(config))],
        },
        "server_update": {
            what: sum(record.get("skipped") == what for record in records) for what in SKIPPED
        },  # the rounds without it
        "evaluations": len(evaluated(records)),
        "curve": [_point(record) for record in _spread(evaluated(records))],
    }


def _change(records: list[dict[str, Any]], number: int) -> dict[str, float | None]:
    """Virtual seconds of the last round before a pruning, and of the first after it."""
    clocks = [0.0, *(record["clock"] for record in records)]
    before = clocks[number] - clocks[number - 1] if number else None
    return {"before": before, "after": clocks[number + 1] - clocks[number]}


def _spread(records: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ten records, evenly spaced, the first and the last included."""
    if len(records) <= POINTS:
        return records
    last = len(records) - 1
    return [records[round(i * last / (POINTS - 1))] for i in range(POINTS)]


def _point(record: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "round",
        "accuracy",
        "loss",
        "clock",
        "alpha",
        "tau_eff",
        "server_accuracy",
        "backdoor",
        "epsilon",
    )
    point = {name: record[name] for name in names if name in record}
    if by_device := record.get("device_accuracy"):
        point |= {"devices_mean": by_device["mean"], "devices_worst_tenth": by_device["worst_tenth"]}
    return point


def devices_text(value: dict[str, Any]) -> str:
    """The accuracies of devices on their own test data, in a line."""
    return (
        f"mean {percent(value['mean'])}, worst tenth {percent(value['worst_tenth'])}, spread "
        f"{percent(value['spread'])}, of {value['devices']:,} devices"
    )


def show(value: dict[str, Any]) -> None:
    """Print the statistics as tables."""
    state = "finished" if value["finished"] else "not finished"
    accuracy = value["accuracy"]
    rows = [
        ("method", ", ".join(f"{key} {setting}" for key, setting in value["method"].items())),
        ("rounds", f"{value['rounds']} of {value['of']}, {state}"),
        (
            "accuracy",
            f"final {percent(accuracy['final'])}, best smoothed {percent(accuracy['best_smoothed'])}",
        ),
        ("virtual clock, wall time", f"{duration(value['clock'])}, {duration(value['wall'])}"),
        ("sent to devices, by devices", f"{byte_size(value['bytes_down'])}, {byte_size(value['bytes_up'])}"),
        ("kernels", value["kernels"]),
        ("parameters, multiply-adds now", f"{value['parameters']:,}, {value['macs']:,}"),
    ]
    if value["device_accuracy"]:
        rows.insert(3, ("accuracy of devices", devices_text(value["device_accuracy"])))
    if value["privacy"]:
        rows.append(("privacy", privacy.statement(value["privacy"])))
    for what, count in value["left_out"].items():
        if count:
            rows.append((f"models {what}", str(count)))
    for what, count in value["server_update"].items():
        if count:
            said = f"in {count:,} of {value['rounds']:,} rounds: {SKIPPED[what]}"
            rows.append(("no server update", said))
    if value["dominant"]:
        last, times = value["dominant"][-1], plural(len(value["dominant"]), "round")
        said = f"in {times}, last of device {last['device']} ({percent(last['share'])})"
        rows.append(("over half of the weight", said))
    console.table(f"{value['run']}: {value['model']} on {value['data']}", ("", ""), rows)
    if value["curve"]:
        _show_curve(value["curve"], value["evaluations"])
    for pruning in value["prunings"]:
        _show_pruning(pruning)
    if lost := value["lost"]:
        _show_lost(lost)
    if screened := value["defence"]["devices"]:
        _show_screened(value["defence"]["rule"], screened)


def _show_curve(curve: list[dict[str, Any]], evaluations: int) -> None:
    columns = list(curve[-1])
    title = "Accuracy by round"
    if len(curve) < evaluations:
        title += f": {len(curve)} of {evaluations:,} rounds"
    rows = [[_shown(name, point.get(name)) for name in columns] for point in curve]
    console.table(title, [name.replace("_", " ") for name in columns], rows)


def _shown(name: str, value: Any) -> Any:
    if value is None:
        return None
    return percent(value) if name in SHARES else f"{value:.4g}" if name == "loss" else value


def _show_lost(lost: list[dict[str, Any]]) -> None:
    columns = ("round", "device", "reason")
    title = "Missing devices"
    if len(lost) > POINTS:
        title += f": the last {POINTS} of {len(lost)} times"
    console.table(title, columns, [[each[name] for name in columns] for each in lost[-POINTS:]])


def _show_screened(rule: str, devices: list[dict[str, Any]]) -> None:
    title = f"Devices that the defence ({rule}) left out or clipped"
    if len(devices) > POINTS:
        title += f": {POINTS} of {len(devices)}"
    columns = ["device", "uploads", "left_out", "clipped", "hostile", "reason"]
    if not any(device["hostile"] for device in devices):
        columns.remove("hostile")
    console.table(
        title,
        [name.replace("_", " ") for name in columns],
        [[device[name] for name in columns] for device in devices[:POINTS]],
    )


def _show_pruning(pruning: dict[str, Any]) -> None:
    nodes = pruning.get("nodes", [])
    rounds = plural(pruning["round"], "round")
    text = f"Pruned after {rounds} at the global rate {pruning['rate']:.3f}"
    if nodes:
        rates = [node["p"] for node in nodes]
        rate = "a rate" if len(nodes) == 1 else "rates"
        text += f", from {plural(len(nodes), 'node')} with {rate} of {span(min(rates), max(rates), '.3f')}"
        clamped = sum(bool(node.get("clamped")) for node in nodes)
        text += f" ({clamped} clamped to the maximum rate)" if clamped else ""
    if pruning["threshold"] is not None:
        text += f"; threshold {pruning['threshold']:.4g}"
    console.out.print(f"{text}.")
    layers = pruning["layers"]
    what = "weights" if any("weights" in layer for layer in layers.values()) else "filters"
    rows = [(name, layer[what], layer["kept"], f"{layer['rate']:.3f}") for name, layer in layers.items()]
    console.table(what.capitalize(), ("layer", "all", "kept", "rate"), rows)
    if refused := pruning.get("refused"):
        console.table("Layers that cannot be cut", ("layer", "reason"), list(refused.items()))
    seconds = pruning["round_seconds"]
    costs = [
        ("parameters", pruning["parameters"]["before"], pruning["parameters"]["after"]),
        ("multiply-adds", pruning["macs"]["before"], pruning["macs"]["after"]),
    ]
    shown: list[tuple[str, str, str, str]] = [
        (what, f"{before:,}", f"{after:,}", f"{after / before - 1:+.1%}") for what, before, after in costs
    ]
    if seconds["before"]:
        change = f"{seconds['after'] / seconds['before'] - 1:+.1%}"
        shown.append(
            ("virtual seconds per round", f"{seconds['before']:.2f}", f"{seconds['after']:.2f}", change)
        )
    console.table("Cost before and after pruning", ("", "before", "after", "change"), shown)

"""Files of a run directory that were altered are noticed, named and, where it is possible, restored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.errors import FeddumapError
from feddumap.runs import integrity
from feddumap.runs.reader import digest, read_config, read_records
from feddumap.runs.records import mark_of
from feddumap.runs.verify import Verification
from feddumap.system.findings import Finding
from tests.conftest import small
from tests.support.command_line import CommandLine
from tests.support.faults import outcome

KEYS: dict[str, Any] = {"method": {"name": "scaffold"}, "train": {"rounds": 4, "cohort": 2}}


@pytest.fixture(scope="module")
def trained(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four rounds whose devices keep state."""
    out = tmp_path_factory.mktemp("integrity") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDDUMAP_HOME", str(prepared_home))
        api.train(small(**KEYS), out)
    return out


@pytest.fixture
def copy(home: Path, trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def states(path: Path, *, repair: bool = True, rewind: bool = False) -> dict[str, Finding]:
    return {found.path: found for found in Verification(path, repair, rewind).run()}


def damaged(found: dict[str, Finding]) -> set[str]:
    return {name for name, each in found.items() if each.state == "damaged"}


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def alter_record(path: Path, number: int) -> None:
    """Another accuracy in the record of a round, as long as the old one."""
    file = path / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    digit = lines[number].index('"accuracy": 0.') + len('"accuracy": 0.')
    other = "1" if lines[number][digit] != "1" else "2"
    lines[number] = lines[number][:digit] + other + lines[number][digit + 1 :]
    file.write_text("".join(lines))


def legacy(path: Path) -> None:
    """Make the checkpoints those of a version that did not record its files."""
    for file in path.glob("checkpoint-*.json"):
        value = json.loads(file.read_text())
        kept = {
            k: v for k, v in value.items() if k not in ("sha256", "config", "split", "records", "memories")
        }
        file.write_text(json.dumps({**kept, "sha256": digest(kept)}))


def test_a_sound_run_has_nothing_to_say(copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    found = states(copy)
    assert {each.state for each in found.values()} == {"ok"}
    assert {"config.toml", "split.safetensors", "records.jsonl", "summary.json", "devices/"} <= set(found)
    assert {"checkpoint-000003.json", "checkpoint-000004.json"} <= set(found)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert integrity.notes([copy]) == []


def test_the_checkpoint_knows_its_files(copy: Path) -> None:
    """The digest of the records is that of the file's first bytes, whatever program computes it."""
    content = (copy / "records.jsonl").read_bytes()
    for path, header in integrity.headers(copy):
        first = b"".join(content.splitlines(keepends=True)[: header["round"]])
        assert header["records"] == mark_of(first).to_json(), path
        assert header["split"] == integrity.read_split(copy)[1]
        assert header["config"] == read_config(copy).to_toml()
        assert header["memories"].keys() == header["devices"].keys()


def test_another_configuration_is_named_and_restored(copy: Path) -> None:
    config = copy / "config.toml"
    original = read_config(copy)
    replace_in(config, "lr = 0.05", "lr = 0.06")
    with pytest.raises(FeddumapError, match=r"train\.lr is 0\.06 instead of 0\.05.*feddumap verify"):
        api.resume(copy)
    (note,) = integrity.notes([copy])
    assert "train.lr is 0.06 instead of 0.05" in note
    assert damaged(states(copy, repair=False)) == {"config.toml"}
    assert read_config(copy) != original
    assert states(copy)["config.toml"].state == "recovered"
    assert read_config(copy) == original
    config.write_text("[train\n")
    assert "not valid TOML" in states(copy)["config.toml"].message
    config.unlink()
    assert states(copy)["config.toml"].state == "recovered"
    assert read_config(copy) == original
    api.resume(copy).close()


def test_keys_that_change_no_result_may_differ(copy: Path) -> None:
    replace_in(copy / "config.toml", "workers = 1", "workers = 2")
    replace_in(copy / "config.toml", "rounds = 4", "rounds = 5")
    said: list[str] = []
    run = api.resume(copy, say=said.append)
    assert run.rounds == 5
    assert any("train.rounds is 5 now; it was 4" in line for line in said)
    run.close()


def test_another_split_is_noticed(copy: Path, tmp_path: Path) -> None:
    other = api.start(small(**KEYS, run={"workers": 1, "seed": 5}), tmp_path / "other")
    other.close()
    shutil.copy(tmp_path / "other" / "split.safetensors", copy)
    with pytest.raises(FeddumapError, match=r"is not the split that checkpoint-000004\.json was made with"):
        api.resume(copy)
    assert damaged(states(copy)) == {"split.safetensors"}
    data = bytearray((tmp_path / "other" / "split.safetensors").read_bytes())
    data[-3] ^= 1
    (copy / "split.safetensors").write_bytes(bytes(data))
    with pytest.raises(FeddumapError, match="its checksum does not match"):
        api.resume(copy)


def test_altered_records_stop_a_resume_and_rewind_goes_back(copy: Path, trained: Path) -> None:
    """No checkpoint supports the records any more: nothing is thrown away without being told to."""
    alter_record(copy, 1)
    message = r"records\.jsonl was altered in rounds that checkpoint-000004\.json was made with"
    with pytest.raises(FeddumapError, match=message):
        api.resume(copy)
    assert message.replace("\\", "") in integrity.notes([copy])[0]
    assert {name for name, each in states(copy).items() if each.state != "ok"} == {"records.jsonl"}
    assert (copy / "checkpoint-000004.json").exists()
    assert "went back to round 0" in states(copy, rewind=True)["records.jsonl"].message
    api.resume(copy).run().close()
    assert outcome(copy) == outcome(trained)
    assert damaged(states(copy)) == set()


def test_an_altered_last_record_costs_one_round(copy: Path, trained: Path) -> None:
    alter_record(copy, 3)
    said: list[str] = []
    run = api.resume(copy, say=said.append)
    assert run.state.round == 3
    assert "was altered" in said[-1]
    run.run().close()
    assert outcome(copy) == outcome(trained)


def test_swapped_memories_are_noticed(copy: Path, trained: Path) -> None:
    """Each of them is whole; only the other's name is wrong."""
    header = integrity.headers(copy)[0][1]
    first, second = (
        copy / "devices" / f"{int(device):06d}-{number:06d}.safetensors"
        for device, number in list(header["devices"].items())[:2]
    )
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert "holds the memory of device" in states(copy, repair=False)["checkpoint-000004.json"].message
    api.resume(copy).run().close()
    assert outcome(copy) == outcome(trained)


def test_a_memory_of_another_run_is_noticed(copy: Path, tmp_path: Path) -> None:
    """It is of the right device and round, and whole."""
    api.train(small(**KEYS, run={"workers": 1, "seed": 5}), tmp_path / "other")
    theirs = {path.name: path for path in (tmp_path / "other" / "devices").iterdir()}
    needed = integrity.headers(copy)[0][1]["devices"].items()
    names = [f"{int(device):06d}-{number:06d}.safetensors" for device, number in needed]
    common = [name for name in names if name in theirs]
    assert common
    shutil.copy(theirs[common[0]], copy / "devices")
    assert (
        "not the memory that the checkpoint" in states(copy, repair=False)["checkpoint-000004.json"].message
    )


def test_old_checkpoints_still_resume(copy: Path, trained: Path) -> None:
    """They say nothing about the other files, so nothing is checked, except that the records are there."""
    legacy(copy)
    assert {each.state for each in states(copy).values()} == {"ok"}
    alter_record(copy, 1)
    assert integrity.notes([copy]) == []
    run = api.resume(copy)
    assert run.finished
    run.close()
    lines = (trained / "records.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "records.jsonl").write_bytes(b"".join(lines[:3]))
    run = api.resume(copy)
    assert run.state.round == 3
    run.run().close()
    assert outcome(copy) == outcome(trained)


def test_verify_mends_what_it_can(copy: Path, trained: Path) -> None:
    """A damaged newest checkpoint, a torn record, a wrong summary, and what a kill leaves behind."""
    (copy / "checkpoint-000004.safetensors").write_bytes(b"")
    with (copy / "records.jsonl").open("a") as file:
        file.write('{"round": 4, "acc')
    replace_in(copy / "summary.json", '"rounds": 4', '"rounds": 7')
    for name in (
        ".summary.json.1.tmp",
        ".checkpoint-000009.json.4194305.tmp",
        "checkpoint-000009.safetensors",
    ):
        (copy / name).touch()
    (copy / "devices" / ".000001-000003.safetensors.4194305.tmp").touch()
    (copy / ".mine.tmp").touch()
    looked = states(copy, repair=False)
    assert damaged(looked) == {"checkpoint-000004.json", "records.jsonl"}  # the summary is not compared
    assert sum(each.state == "leftover" for each in looked.values()) == 4
    found = states(copy)
    assert {name: each.state for name, each in found.items() if each.state != "ok"} == {
        "checkpoint-000004.json": "recovered",
        "records.jsonl": "recovered",
        "summary.json": "recovered",
        ".summary.json.1.tmp": "leftover",
        ".checkpoint-000009.json.4194305.tmp": "leftover",
        "checkpoint-000009.safetensors": "leftover",
        "devices/.000001-000003.safetensors.4194305.tmp": "leftover",
    }
    assert {each.state for each in states(copy).values()} == {"ok"}
    assert [path.name for path in copy.rglob("*.tmp")] == [".mine.tmp"]  # not ours
    api.resume(copy).run().close()
    assert outcome(copy) == outcome(trained)
    assert (copy / "summary.json").exists()


@pytest.fixture
def run_command(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def test_the_commands_say_it(copy: Path, run_command: CommandLine) -> None:
    alter_record(copy, 1)
    code, printed, errors = run_command("inspect", "run", str(copy))
    assert code == 0
    assert printed
    assert "records.jsonl was altered" in " ".join(errors.split())
    code, _, errors = run_command("compare", str(copy))
    assert code == 0
    assert "records.jsonl was altered" in " ".join(errors.split())
    code, printed, errors = run_command("verify", "--dry-run", str(copy), "--json")
    assert code == 1
    assert [each["path"] for each in json.loads(printed) if each["state"] == "damaged"] == ["records.jsonl"]
    assert "1 file of" in errors
    assert run_command("verify", "--rewind", str(copy))[0] == 0
    assert read_records(copy) == []


def test_a_folder_that_is_no_run(run_command: CommandLine, tmp_path: Path) -> None:
    code, _, errors = run_command("verify", str(tmp_path))
    assert code == 2
    assert "is not a run directory" in errors
    assert run_command("verify", str(tmp_path / "none"))[0] == 2

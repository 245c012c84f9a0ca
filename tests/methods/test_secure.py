"""Which methods go with secure aggregation: what they declare, what they do, and what the documents say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feddumap import run as api
from feddumap.config import Config
from feddumap.engine.local import LocalCohort
from feddumap.errors import FeddumapError
from feddumap.methods import compose, secure
from feddumap.methods.registry import RECIPES
from tests.conftest import small

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploy.md"


def of(method: str, **sections: dict[str, Any]) -> Config:
    keys: dict[str, Any] = {"adjust_every": 1, "first_passes": 2} if method == "prunefl" else {}
    return small(
        method={"name": method, **keys},
        data={"server_fraction": 0.2},
        **{"train": {"rounds": 1}, **sections},
    )


def table() -> dict[str, bool]:
    """The rows of the table in the document: whether each method goes with secure aggregation."""
    found: dict[str, bool] = {}
    _, _, rest = DOCUMENT.read_text().partition("| methods | secure aggregation |")
    for line in rest.partition("\n\n")[0].splitlines()[2:]:
        names, goes = (cell.strip() for cell in line.split("|")[1:3])
        found |= {name.strip(" `"): goes.startswith("yes") for name in names.split(",")}
    return found


def test_the_document_has_every_method_as_it_is() -> None:
    assert table() == {name: secure.obstacle(compose(of(name))) is None for name in RECIPES}


MEAN_ONLY = [name for name in RECIPES if not compose(of(name)).needs_single_uploads]


@pytest.mark.parametrize("method", MEAN_ONLY)
def test_methods_upload_what_they_declare(home: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra: list[bool] = []
    train = LocalCohort.train

    def watched(self: Any, *args: Any) -> Any:
        for upload in train(self, *args):
            extra.append(bool(upload.extra))
            yield upload

    monkeypatch.setattr(LocalCohort, "train", watched)
    api.train(of(method))
    assert extra
    assert any(extra) == compose(of(method)).uploads_extra


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"name": "feddf"}}, "'feddf': the server needs the upload of every single device"),
        ({"method": {"name": "fedkt"}}, "single device"),
        ({"method": {"name": "scaffold"}}, "besides the model"),
        ({"run": {"engine": "local"}}, "run.engine = 'local'"),
        ({"train": {"cohort": 2}}, "train.cohort = 2"),
    ],
)
def test_a_run_that_cannot_have_it_is_an_error(home: Path, sections: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"method": {"name": "fedavg"}, "run": {}, "train": {"cohort": 3}, **sections}
    config = small(data={"server_fraction": 0.2}, **given)
    config = config.replace(run={"engine": "flower", "secure": True, **given["run"]})
    with pytest.raises(FeddumapError, match=r"run\.secure = true") as error:
        api.start(config)
    assert said in str(error.value)


def test_a_users_aggregation_needs_single_uploads_unless_it_says_otherwise() -> None:
    from dataclasses import replace

    from feddumap.core.algorithm import mean_of_uploads
    from feddumap.methods.guard import guarded

    plain = compose(of("fedavg"))
    other = replace(plain, aggregate=lambda uploads, view: mean_of_uploads(uploads, view))
    assert not guarded(plain, "mine").needs_single_uploads
    assert guarded(other, "mine").needs_single_uploads
    assert not guarded(replace(other, mean_only=True), "mine").needs_single_uploads

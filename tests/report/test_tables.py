"""One table in five formats: each is parsed back."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from feddumap.report.tables import (
    Column,
    Document,
    Format,
    Table,
    TableCell,
    mark_best,
    render,
    show,
    text_column,
)

LABEL = r"my_net 50% & #1 {a}|b\c [bold]x[/bold] ~^<1 *"


@pytest.fixture
def document() -> Document:
    scores = [0.5, 0.75, None]
    cells = (
        TableCell("50.00 ± 1.00", {"mean": 0.5, "std": 0.01}),
        TableCell("75.00", {"mean": 0.75, "std": None}),
        TableCell("-", {"mean": None, "std": None}),
    )
    series = text_column("series", "series", ["plain", LABEL, "last"])
    first = Table("Accuracy_1", (series, Column("final (%)", "final", mark_best(cells, scores))))
    changes = tuple(TableCell(f"{value:+.2f}", {"": value}) for value in (-0.25, 1.0, -3.0))
    second = Table("Change", (series, Column("points", "change", changes)))
    return Document((first, second), ("a note | of_some",), {"series": [LABEL], "value": 0.1})


def test_the_best_is_marked_and_a_tie_of_all_is_not() -> None:
    cells = [TableCell("a"), TableCell("b"), TableCell("c")]
    assert [cell.best for cell in mark_best(cells, [1.0, 2.0, 2.0])] == [False, True, True]
    assert [cell.best for cell in mark_best(cells, [1.0, 2.0, None], lowest=True)] == [True, False, False]
    assert not any(cell.best for cell in mark_best(cells, [2.0, 2.0, None]))


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table("", (text_column("a", "a", ["x", "y"]), text_column("b", "b", ["x"]))).rows()


def test_csv_joins_the_tables_and_keeps_numbers(document: Document) -> None:
    rows = list(csv.DictReader(io.StringIO(render(document, "csv"))))
    assert [row["series"] for row in rows] == ["plain", LABEL, "last"]
    assert list(rows[0]) == ["series", "final_mean", "final_std", "change"]
    assert list(rows[0].values()) == ["plain", "0.5", "0.01", "-0.25"]
    assert list(rows[2].values()) == ["last", "", "", "-3.0"]


def test_json_is_the_data(document: Document) -> None:
    assert json.loads(render(document, "json")) == document.data
    with pytest.raises(ValueError, match="JSON"):
        render(Document((), (), float("nan")), "json")


def test_markdown_cells_survive(document: Document) -> None:
    text = render(document, "markdown")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    parsed = [
        [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]
    assert parsed[:2] == [["series", "final (%)"], ["---", "---:"]]
    assert parsed[2:5] == [["plain", "50.00 ± 1.00"], [LABEL, "**75.00**"], ["last", "-"]]
    assert text.endswith("- a note \\| of_some\n")


def read_latex(text: str) -> list[list[str]]:
    """The cells of a tabular, with the escapes undone."""
    undone = {
        r"\textbackslash{}": "\0",
        r"\textasciitilde{}": "~",
        r"\textasciicircum{}": "^",
        r"\textbar{}": "|",
        r"$\pm$": "±",
        "$<$": "<",
        "$-$": "-",
        "{[}": "[",
        "{*}": "*",
    }
    body = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    rows = []
    for line in body.removesuffix(" \\\\\n").split(" \\\\\n"):
        cells = re.split(r" (?<!\\)& ", line)
        for escape, character in undone.items():
            cells = [cell.replace(escape, character) for cell in cells]
        rows.append([re.sub(r"\\([&%$#_{}])", r"\1", cell).replace("\0", "\\") for cell in cells])
    return rows


def test_latex_is_escaped_and_balanced(document: Document) -> None:
    text = render(document, "latex")
    first, second = re.findall(r"\\begin\{tabular\}.*?\\end\{tabular\}", text, re.DOTALL)
    assert first.startswith("\\begin{tabular}{lr}\n\\toprule\nseries & final (\\%) \\\\\n\\midrule\n")
    assert read_latex(first) == [["plain", "50.00 ± 1.00"], [LABEL, "\\textbf{75.00}"], ["last", "-"]]
    assert [row[1] for row in read_latex(second)] == ["-0.25", "+1.00", "-3.00"]
    outside = [line for line in text.replace(first, "").replace(second, "").splitlines() if line]
    assert all(line.startswith("% ") for line in outside), "only comments besides the tabulars"
    for special in ("%", "&", "#", "_"):
        assert not re.search(rf"(?<!\\){special}", first.replace(" & ", " ")), special
    bare = re.sub(r"\\[{}]", "", first)
    assert bare.count("{") == bare.count("}")
    assert "plain & $-$0.25 \\\\\n" in second, "a minus, not a hyphen"


@pytest.mark.parametrize("label", ["[1pt]", "*"])
def test_a_latex_row_is_no_argument_of_the_one_before(label: str) -> None:
    text = render(Document((Table("", (text_column("series", "series", ["a", label]),)),), (), None), "latex")
    assert f"a \\\\\n{{{label[0]}}}{label[1:]} \\\\\n" in text


def test_a_label_with_a_line_break_stays_in_its_row() -> None:
    document = Document((Table("t\nu", (text_column("series", "series", ["a\nb"]),)),), ("n\nm",), None)
    assert "| a b |" in render(document, "markdown")
    assert "\na b \\\\\n" in render(document, "latex")
    assert "% t u\n" in render(document, "latex")


def test_text_shows_labels_as_they_are(document: Document, capsys: pytest.CaptureFixture[str]) -> None:
    text = render(document, "table")
    assert capsys.readouterr().out == ""
    assert LABEL in text
    assert re.search(r"plain +│ +50\.00 ± 1\.00 │", text), "numbers to the right"
    assert text.endswith("- a note | of_some\n")
    show(document)
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "latex", "json"])
def test_every_format_ends_its_last_line(document: Document, form: Format) -> None:
    text = render(document, form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")

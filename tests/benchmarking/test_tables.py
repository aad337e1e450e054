"""Tables fit a terminal of 80 columns where words can stand below one another, and lose nothing by it."""

from polysketch.benchmarking.tables import COLUMNS, print_table, print_text

ROW = {
    "length": "16,384",
    "": "learned sketch",
    "backend": "native",
    "ms": "1,234.567",
    "speedup over the baseline": "12.34",
    "floor ms": "987.654",
    "of floor": "80%",
    "tokens/s": "1,234,567",
    "memory": "",
}


def shown(capsys, rows):
    print_table(rows)
    return capsys.readouterr().out.splitlines()


def test_a_wide_table_gets_names_of_several_lines(capsys):
    *heads, cells = shown(capsys, [ROW])
    assert len(heads) > 1
    assert max(map(len, [*heads, cells])) <= COLUMNS
    words = [word for name, cell in ROW.items() if cell for word in name.split()]
    assert sorted(" ".join(heads).split()) == sorted(words)
    assert cells.split() == [word for cell in ROW.values() for word in cell.split()]


def test_every_word_stands_above_its_column(capsys):
    """Right-aligned: the last letter of each line of a name is above the last letter of the cell, or left of it."""
    *heads, cells = shown(capsys, [ROW])
    end = cells.index("12.34") + len("12.34")
    start = cells.index("1,234.567") + len("1,234.567")
    assert [head[start:end].strip() for head in heads if head[start:end].strip()] == ["speedup", "over the", "baseline"]


def test_a_narrow_table_keeps_names_in_one_line(capsys):
    lines = shown(capsys, [{"length": "512", "speedup over sdpa": "1.0"}])
    assert lines == ["length  speedup over sdpa", "   512                1.0"]


def test_empty_columns_and_no_rows_are_left_out(capsys):
    assert "memory" not in shown(capsys, [ROW])[0]
    assert shown(capsys, []) == []


def test_words_that_cannot_be_parted_stay_whole(capsys):
    wide = {f"{letter * 30}": "1" for letter in "abcd"}
    assert shown(capsys, [wide])[0].split() == list(wide)


def test_sentences_are_broken(capsys):
    print_text("word " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert " ".join(lines).split() == ["word"] * 40

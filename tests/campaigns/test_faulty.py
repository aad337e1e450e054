"""What a power cut takes back, from the log of a process's calls."""

from campaigns.faulty import cut_power


def test_a_new_name_that_was_not_waited_for_is_the_old_one_again_in_a_folder_that_is_gone_too(tmp_path):
    """As the compiled programs get their name: written in a folder of their own, renamed, and the folder deleted."""
    made, name, log = tmp_path / "made" / "file", tmp_path / "name", tmp_path / "log"
    name.write_text("whole")
    log.write_text(f"o\t{made}\t\t0\ns\t{made}\t\t5\nr\t{made}\t{name}\t0\n")
    cut_power(log)
    assert not name.exists()
    assert made.read_text() == "whole"


def test_what_was_synced_keeps_its_bytes_and_its_name(tmp_path):
    made, name, log = tmp_path / "made", tmp_path / "name", tmp_path / "log"
    name.write_text("whole, and more")
    log.write_text(f"o\t{made}\t\t0\ns\t{made}\t\t5\nr\t{made}\t{name}\t0\ns\t{tmp_path}\t\t0\n")
    cut_power(log)
    assert name.read_text() == "whole"
    assert not made.exists()

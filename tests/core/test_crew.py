"""Who works in a state folder is known by locks."""

from pathlib import Path

from runtime.launch.crew import dead, enroll


def test_who_holds_its_lock_is_alive_and_who_left_it_behind_is_dead(tmp_path: Path) -> None:
    assert list(dead(tmp_path)) == []
    (one, lock), (two, other) = enroll(tmp_path), enroll(tmp_path)
    assert one != two
    assert list(dead(tmp_path)) == []
    lock.release()
    assert [name for name, _ in dead(tmp_path)] == [one]
    assert [path for _, path in dead(tmp_path)] == [tmp_path / "workers" / f"{one}.lock"]
    other.release()
    assert {name for name, _ in dead(tmp_path)} == {one, two}


def test_one_that_is_just_enrolling_is_not_taken_for_dead(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / ".1-abc.new").touch()
    assert list(dead(tmp_path)) == []

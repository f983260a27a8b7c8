"""What configuration files say about their keys."""

from pathlib import Path

from fedsim.app.comments import comments_by_key, first_comment


def test_comments_belong_to_the_keys_they_stand_beside(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "# @package _global_\n# what it is,\n# in two lines\na: 1  # one\nb:\n  c: '#no'  # two, that\n     # goes on\n"
        "  d: [1, 2]\ne: {f: 1}  # three\ng: |-\n  # text\nh: null # four\n"
    )
    assert first_comment(path) == "what it is, in two lines"
    assert comments_by_key(path) == {"a": "one", "b.c": "two, that goes on", "e": "three", "h": "four"}

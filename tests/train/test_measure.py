"""Bytes alive at once, from allocations and what is freed of them, seen and unseen."""

from greylag.train.measure import peak_alive


def test_the_peak_is_what_lies_there_at_once() -> None:
    assert peak_alive([(100, 10), (200, 5), (100, -10), (300, 7), (200, -5), (300, -7)]) == 15


def test_what_is_freed_without_a_word_makes_room_for_what_comes() -> None:
    held = [(100, 50), (200, 50), (300, 50)]
    assert peak_alive([*held, (100, 50)]) == 150
    assert peak_alive([*held, (120, 10)]) == 150  # inside of the first
    assert peak_alive([*held, (90, 20)]) == 150  # over its beginning
    assert peak_alive([*held, (140, 100)]) == 150  # over the end of the first and most of the second
    assert peak_alive([*held, (150, 50)]) == 200  # between them


def test_freeing_what_was_never_seen_is_nothing() -> None:
    assert peak_alive([(7, -8), (100, 10), (7, -8)]) == 10

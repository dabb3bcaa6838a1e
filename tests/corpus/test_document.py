from bessemer.corpus.document import identity


def test_identity_depends_only_on_source_and_position() -> None:
    assert identity("a", "x", "1") == identity("a", "x", "1")
    places = [("a", "x", "1"), ("b", "x", "1"), ("a", "y", "1"), ("a", "x", "2"), ("a", "x1", "")]
    assert len({identity(*place) for place in places}) == len(places)


def test_identity_is_128_bits_that_never_change() -> None:
    assert identity("code", "python://stdlib/abc.py", "") == "5c95a2b76846e7fc57eb19b631a13cde"

"""Strings that the word splitter keeps whole or cuts in its own way: contractions, abbreviations, emoticons, units.

They are those of spaCy 3.8's blank English tokenizer (spacy/lang/en/tokenizer_exceptions.py and
spacy/lang/tokenizer_exceptions.py), which datatrove's filters split words with: written down anew, as short as their
grammar allows, because which documents a filter keeps depends on how words are cut.
"""

from __future__ import annotations

from collections.abc import Iterator

PERSONS = ("i", "you", "he", "she", "it", "we", "they")
QUESTIONS = ("who", "what", "when", "where", "why", "how", "there", "that", "this", "these", "those")
NEGATED = (
    "ca",
    "could",
    "do",
    "does",
    "did",
    "had",
    "may",
    "might",
    "must",
    "need",
    "ought",
    "sha",
    "should",
    "wo",
    "would",
)
"""Verbs that take n't and n't've."""
NEGATED_ONLY = ("ai", "are", "is", "was", "were", "have", "has", "dare")
"""Verbs that take n't alone."""
WORDS = {"ill", "its", "hell", "shell", "shed", "were", "well", "whore"}
"""Words of their own that a contraction without its apostrophe would look like."""

DROPPED_G = ("doin", "goin", "nothin", "nuthin", "ol", "somethin", "lovin", "havin")
DROPPED_START = ("em", "ll", "nuff")
CAUSE = ("'Cause", "'cause", "'cos", "'Cos", "'coz", "'Coz", "'cuz", "'Cuz", "'bout")

ABBREVIATIONS = """
'S 's 're 'd '' ' — and/or w/o \\") \\n \\t <space> ma'am Ma'am o'clock O'clock C++
a.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. Mr.
Mrs. Ms. p.m. Ph.D. Prof. Rep. Rev. Sen. St. vs. v.s. Mt. Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del.
Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. Jun. Kan. Kans. Ky. La. Mar. Mass. Mich. Minn. Miss. N.C. N.D. N.H. N.J. N.M.
N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa. S.C. Sep. Sept. Tenn. Va. Wash. Wis. ä. ö. ü.
"""

EMOTICONS = r"""
(*_*) (-8 (-: (-; (-_-) (._.) (: (; (= (>_<) (^_^) (o: )-: ): -_- -__- ._. 0.0 0.o 0_0 0_o 8) 8-) 8-D 8D :'( :') :'-( :'-)
:( :(( :((( :() :) :)) :))) :* :-( :-(( :-((( :-) :-)) :-))) :-* :-/ :-0 :-3 :-> :-D :-O :-P :-X :-] :-o :-p :-x :-| :-}
:/ :0 :1 :3 :> :D :O :P :X :] :o :o) :p :x :| :} ;) ;-) ;-D ;D ;_; <.< </3 <3 <33 <333 =( =) =/ =3 =D =[ =] =| >.< >.> >:(
>:o ><(((*> @_@ O.O O.o O_O O_o V.V V_V XD XDD [-: [: [= ]= ^_^ ^__^ ^___^ o.0 o.O o.o o_0 o_O o_o v.v v_v xD xDD
"""

UNITS = """
km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa mbar mb MB
kb KB gb GB tb TB T G M K % км км² км³ м м² м³ дм дм² дм³ см см² см³ мм мм² мм³ нм кг г мг м/с км/ч кПа Па мбар Кб КБ кб Мб
МБ мб Гб ГБ гб Тб ТБ тб كم كم² كم³ م م² م³ سم سم² سم³ مم مم² مم³ غرام جرام جم كغ ملغ كوب اكواب
"""
"""What is cut off after a digit: 10km is two words."""

LONGEST = 12
"""Characters of the longest special string."""


def specials() -> dict[str, tuple[str, ...]]:
    """Each special string and the words it is; most are one word."""
    found: dict[str, tuple[str, ...]] = {}
    for pieces in _contractions():
        for first in (pieces[0], pieces[0].title()):
            cut = (first, *pieces[1:])
            bare = tuple(piece.replace("'", "") for piece in cut)
            for way in (cut, bare):
                if "".join(way).lower() not in WORDS:
                    found["".join(way)] = way
    for stem in DROPPED_G:
        for form in (stem, stem.title()):
            found |= {form: (form,), form + "'": (form + "'",)}
    for rest in DROPPED_START:
        found |= {rest: (rest,), "'" + rest: ("'" + rest,)}
    for hour in range(1, 13):
        for half in ("a.m.", "am", "p.m.", "pm"):
            found[f"{hour}{half}"] = (str(hour), half)
    for word in ("cannot", "Cannot", "gonna", "Gonna", "gotta", "Gotta"):
        found[word] = (word[:3], word[3:])
    for pieces in (
        ("y", "'all"),
        ("y", "all"),
        ("let", "'s"),
        ("Let", "'s"),
        ("c'm", "on"),
        ("C'm", "on"),
        ("how", "'d", "'y"),
        ("How", "'d", "'y"),
    ):
        found["".join(pieces)] = pieces
    for letter in "abcdefghijklmnopqrstuvwxyz":
        found[letter + "."] = (letter + ".",)
    for whole in (*CAUSE, *ABBREVIATIONS.split(), *EMOTICONS.split()):
        found.setdefault(whole, (whole,))
    curly = {
        text.replace("'", "’"): tuple(piece.replace("'", "’") for piece in cut)
        for text, cut in found.items()
        if "'" in text
    }
    return found | curly | {"‘S": ("‘S",), "‘s": ("‘s",)}


def _contractions() -> Iterator[tuple[str, ...]]:
    """Contractions in lower case with their apostrophes, cut into words."""
    for who in (*PERSONS, *QUESTIONS):
        yield from ((who, "'ll"), (who, "'ll", "'ve"), (who, "'d"), (who, "'d", "'ve"))
    for who in ("i", "you", "we", "they", *QUESTIONS):
        if who not in ("that", "this"):
            yield (who, "'ve")
    for who in ("you", "we", "they", *QUESTIONS):
        if who not in ("that", "this"):
            yield (who, "'re")
    for who in ("he", "she", "it", *QUESTIONS):
        if who not in ("these", "those"):
            yield (who, "'s")
    yield from (("i", "'m"), ("i", "'m", "a"))
    for verb in NEGATED:
        yield from ((verb, "n't"), (verb, "n't", "'ve"))
    yield from ((verb, "n't") for verb in NEGATED_ONLY)
    yield from ((verb, "'ve") for verb in ("could", "might", "must", "should", "would", "not"))

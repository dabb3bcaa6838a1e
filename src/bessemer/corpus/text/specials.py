"""Tokenizer exceptions: contractions, abbreviations, emoticons, units.

Those of spaCy 3.8's blank English tokenizer (spacy/lang/en/tokenizer_exceptions.py,
spacy/lang/tokenizer_exceptions.py), by which datatrove's filters split words, in compact form.
"""

from __future__ import annotations

from collections.abc import Iterator

PERSONS = ("i", "you", "he", "she", "it", "we", "they")
QUESTIONS = ("who", "what", "when", "where", "why", "how", "there", "that", "this", "these", "those")
NEGATED = "ca could do does did had may might must need ought sha should wo would"
"""Verbs that take n't and n't've."""
NEGATED_ONLY = "ai are is was were have has dare"
"""Verbs that take n't alone."""
WORDS = {"ill", "its", "hell", "shell", "shed", "were", "well", "whore"}
"""Words of their own that a contraction without its apostrophe would look like."""
PAIRS = "can/not Can/not gon/na Gon/na got/ta Got/ta y/'all y/all let/'s Let/'s c'm/on C'm/on how/'d/'y How/'d/'y"
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
            words = (first, *pieces[1:])
            for form in (words, tuple(piece.replace("'", "") for piece in words)):
                if "".join(form).lower() not in WORDS:
                    found["".join(form)] = form
    whole = [form + mark for stem in DROPPED_G for form in (stem, stem.title()) for mark in ("", "'")]
    whole += [mark + rest for rest in DROPPED_START for mark in ("", "'")]
    whole += [letter + "." for letter in "abcdefghijklmnopqrstuvwxyz"]
    found |= {text: (text,) for text in whole}
    for hour in range(1, 13):
        found |= {f"{hour}{half}": (str(hour), half) for half in ("a.m.", "am", "p.m.", "pm")}
    found |= {pair.replace("/", ""): tuple(pair.split("/")) for pair in PAIRS.split()}
    for text in (*CAUSE, *ABBREVIATIONS.split(), *EMOTICONS.split()):
        found.setdefault(text, (text,))
    curly = {
        text.replace("'", "’"): tuple(piece.replace("'", "’") for piece in words)
        for text, words in found.items()
        if "'" in text
    }
    return found | curly | {"‘S": ("‘S",), "‘s": ("‘s",)}


def _contractions() -> Iterator[tuple[str, ...]]:
    """Contractions in lower case with their apostrophes, split into words."""
    for who in (*PERSONS, *QUESTIONS):
        yield from ((who, "'ll"), (who, "'ll", "'ve"), (who, "'d"), (who, "'d", "'ve"))
    have = [who for who in ("i", "you", "we", "they", *QUESTIONS) if who not in ("that", "this")]
    yield from ((who, "'ve") for who in have)
    yield from ((who, "'re") for who in have[1:])
    yield from ((who, "'s") for who in ("he", "she", "it", *QUESTIONS[:-2]))
    yield from (("i", "'m"), ("i", "'m", "a"))
    for verb in NEGATED.split():
        yield from ((verb, "n't"), (verb, "n't", "'ve"))
    yield from ((verb, "n't") for verb in NEGATED_ONLY.split())
    yield from ((verb, "'ve") for verb in ("could", "might", "must", "should", "would", "not"))

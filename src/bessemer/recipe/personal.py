"""[corpus.personal] of the recipe: personal data that is replaced by typed placeholders."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bessemer.recipe.section import Section

Kind = Literal["email", "phone", "ip", "card", "iban"]
Country = Literal["br", "ch", "de", "es", "fr", "gb", "in", "it", "nl", "pl", "se", "us"]


class Placeholders(Section):
    """What stands where personal data stood."""

    email: str = Field("<EMAIL>", description="In place of an e-mail address.")
    phone: str = Field("<PHONE>", description="In place of a phone number.")
    ip: str = Field("<IP>", description="In place of a public IP address.")
    card: str = Field("<CARD>", description="In place of a payment card's number.")
    iban: str = Field("<IBAN>", description="In place of a bank account's number.")
    national: str = Field("<NATIONAL_ID>", description="In place of a national number.")


class PersonalData(Section):
    """Personal data that is replaced by typed placeholders and counted. Off until kinds are named."""

    kinds: tuple[Kind, ...] = Field(
        (),
        strict=False,
        description="What is replaced: email, phone (international and common national forms), ip (public addresses), "
        "card (issuer prefix and Luhn's checksum), iban (length by country and checksum); empty: nothing.",
    )
    national: tuple[Country, ...] = Field(
        (),
        strict=False,
        description="Countries whose national numbers are replaced where form and checksum agree: br (CPF), ch (AHV), "
        "de (tax id), es (DNI, NIE), fr (NIR), gb (NHS), in (Aadhaar), it (codice fiscale), nl (BSN), pl (PESEL), "
        "se (personnummer), us (SSN).",
    )
    placeholders: Placeholders = Field(default_factory=Placeholders, description="What stands in its place.")

"""Articles 1 and 2 (shortened) of the Universal Declaration of Human Rights (United Nations, 1948; free to use)."""

DECLARATION = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience and "
    "should act towards one another in a spirit of brotherhood.\nEveryone is entitled to all the rights and freedoms set "
    "forth in this Declaration, without distinction of any kind, such as race, colour, sex, language, religion.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und "
    "sollen einander im Geist der Brüderlichkeit begegnen.\nJeder hat Anspruch auf die in dieser Erklärung verkündeten "
    "Rechte und Freiheiten ohne irgendeinen Unterschied, etwa nach Rasse, Hautfarbe, Geschlecht, Sprache, Religion.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience "
    "et doivent agir les uns envers les autres dans un esprit de fraternité.\nChacun peut se prévaloir de tous les droits et "
    "de toutes les libertés proclamés dans la présente Déclaration, sans distinction aucune.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y conciencia, "
    "deben comportarse fraternalmente los unos con los otros.\nToda persona tiene todos los derechos y libertades "
    "proclamados en esta Declaración, sin distinción alguna de raza, color, sexo, idioma, religión.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di coscienza e "
    "devono agire gli uni verso gli altri in spirito di fratellanza.\nAd ogni individuo spettano tutti i diritti e tutte le "
    "libertà enunciate nella presente Dichiarazione, senza distinzione alcuna.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de consciência, devem "
    "agir uns para com os outros em espírito de fraternidade.\nTodos os seres humanos podem invocar os direitos e as "
    "liberdades proclamados na presente Declaração, sem distinção alguma.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и должны "
    "поступать в отношении друг друга в духе братства.\nКаждый человек должен обладать всеми правами и всеми свободами, "
    "провозглашенными настоящей Декларацией, без какого бы то ни было различия.",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。\n"
    "人人有资格享有本宣言所载的一切权利和自由,不分种族、肤色、性别、语言、宗教、政治或其他见解。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられており、"
    "互いに同胞の精神をもって行動しなければならない。",
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميرًا وعليهم أن يعامل بعضهم بعضًا بروح الإخاء.",
}

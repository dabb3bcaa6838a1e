"""Lines labelled manually: the text between ⟦ and ⟧ is personal data of the kind named; other lines have none.

The numbers are invented or are the issuers' own test numbers; none belongs to a person.
"""

EMAIL = """
Write to ⟦jane.doe@company.co.uk⟧ for details.
Contact: ⟦j_doe+news@mail.city-hall.berlin⟧.
<⟦linus@kernel-people.org⟧>
Author-email: Jane Doe <⟦jane@doe.dev⟧>, John <⟦john@doe.dev⟧>
jörg: ⟦jörg.müller@müller-bäcker.de⟧
⟦user@xn--bcher-kva.example-shop.com⟧
Reply to ⟦o'brien@dublin.ie⟧ today
⟦1755071+someone@users.noreply.github.com⟧
邮箱:⟦zhang.wei@qq.com⟧
mail=⟦anna@firma.pl⟧;phone=
⟦x.y.z@a.b.c.d.e.org⟧
user@example.com is not an address of anybody
foo@bar.test and foo@bar.invalid
git@github.com:owner/name.git
icon@2x.png and logo@3x.jpeg
getty@tty1.service must run
root@machine.local
@dataclass
C = A@B.inv()
npm install package@1.2.3
@media print { a@b }
me AT company DOT com
https://medium.com/@someone/story
foo@bar..com
"""

PHONE = """
Call ⟦+49 30 901820⟧ now.
⟦+1 212-736-5000⟧
⟦+33 1 42 34 56 78⟧ (Paris)
⟦+7 495 123-45-67⟧
⟦+86 138 0013 8000⟧
Fax ⟦+41 44 668 18 00⟧
+999 12 345678
212-736-5000
ISBN 978-3-16-148410-0
version 1.12.345.6789
d41d8cd98f00b204e9800998ecf8427e
1e+1000000000
+0100 is a time zone
"""

IP = """
Server at ⟦82.50.72.202⟧ went down
http://⟦66.35.250.150⟧/index.html
[⟦2a00:1450:4001:81b::200e⟧]
from ⟦2606:4700:4700::1111⟧ port 443
⟦2001:4860:4860:0:0:0:0:8888⟧.
127.0.0.1
10.1.2.3 and 192.168.0.1
169.254.10.20
192.0.2.44 is for documentation
224.0.0.251
0.0.0.0
version 104.0.5112.79
Chrome/91.0.44.124
Section 12.1.2.3
12.1.2.3. RAID levels
1.3.6.1.4.1.311
300.1.2.3
62.151.12.3-beta
python==120.50.60.70
1.0.0.127.in-addr.arpa
2001:db8::1
::1
fd12:3456:789a::1
std::vector::iterator
10:20:30
00:1b:44:11:3a:b7
2001::1
abc::def
"""

CARD = """
Visa ⟦4111 1111 1111 1111⟧
⟦4242-4242-4242-4242⟧
⟦2223003122003222⟧
Amex ⟦3782 822463 10005⟧
⟦6011111111111117⟧
⟦30569309025904⟧
⟦3530111333300000⟧
⟦6200000000000005⟧
4111 1111 1111 1112
1234567812345670
0.4111111111111111
id=4111111111111111
4111-1111 1111-1111
"""

IBAN = """
IBAN ⟦DE89 3704 0044 0532 0130 00⟧
⟦GB29NWBK60161331926819⟧
⟦FR14 2004 1010 0505 0001 3M02 606⟧,
⟦CH93 0076 2011 6238 5295 7⟧ BIC
⟦ES9121000418450200051332⟧
⟦BE68539007547034⟧
DE89 3704 0044 0532 0130 01
DE89370400440532013
XX89370400440532013000
ABDE89370400440532013000
MD5 SHA1 CRC32
"""

NATIONAL = """
SSN ⟦536-90-4399⟧
DNI ⟦12345678Z⟧
NIE ⟦X-1234567-L⟧
Steuer-ID ⟦36 574 261 809⟧
IdNr. ⟦36574261809⟧
NIR ⟦2 95 10 99 126 111 93⟧
⟦RSSMRA85T10A562S⟧
NHS number ⟦943 476 5919⟧
CPF ⟦390.533.447-05⟧
PESEL: ⟦44051401359⟧
⟦880320-0016⟧
AHV ⟦756.9217.0769.85⟧
Aadhaar ⟦2341 2341 2346⟧
000-12-3456
12345678A
111222333
x=536-90-4399
536-90-4399-1
390.533.447-06
880320-0017
"""

LINES = {"email": EMAIL, "ip": IP, "card": CARD, "iban": IBAN, "national": NATIONAL}

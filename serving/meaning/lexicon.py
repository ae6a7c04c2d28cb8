"""The words that the guards know: opposites, negations, numbers, units, names. English first; the commonest of some neighbours.

Lists of words, kept apart from what is done with them. A missing word costs one check of one pair; a wrong one costs a miss.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """Return the words of a list that is written as a text."""
    return frozenset(text.split())


_OPPOSITES = """
on | off
enable activate unfreeze unblock | disable deactivate freeze block
open unlock | close shut lock
start begin commence launch resume | stop end finish quit pause halt
before prior earlier | after later following afterwards
increase raise grow rise gain boost | decrease reduce lower drop fall shrink loss
add insert append include plus | remove delete drop exclude subtract minus
multiply times | divide
sum product difference quotient
integral integrate | derivative differentiate
sine sin | cosine cos | tangent tan
odd | even
positive | negative
numerator | denominator
maximum max maximal maximise maximize upper largest | minimum min minimal minimise minimize lower smallest least
biggest highest greatest largest most | lowest fewest smallest least
more greater larger bigger higher above over exceed | less fewer smaller lower below under beneath
longer | shorter
faster quicker | slower
older elder | younger newer
cheaper | dearer pricier
better best | worse worst
most | least fewest
many | few
all every everyone everything both | some any | none nothing nobody
always | never | sometimes often | rarely seldom
must mandatory required obligatory compulsory | optional may
with using including | without excluding lacking sans ohne
avec mit con | sans ohne sin
allow permit accept approve authorise authorize grant | forbid prohibit ban deny reject refuse decline disallow
legal lawful | illegal unlawful
safe | dangerous unsafe harmful risky
true correct right | false incorrect wrong
yes | no
good | bad
high | low
hot warm | cold cool
big large huge | small little tiny
long | short
tall | short
wide broad | narrow
thick | thin
deep | shallow
heavy | lightweight
light bright | dark dim
fast quick | slow
early | late
old | new young
old used | fresh
rich | poor
strong | weak
hard difficult | easy simple
hard solid | soft liquid
wet | dry
clean | dirty
full | empty
loud | quiet silent
cheap inexpensive | expensive costly
free | paid
public | private
internal inner inside indoor | external outer outside outdoor
local domestic national | foreign international abroad overseas
online | offline
virtual digital | physical plastic
static | dynamic
sync synchronous | async asynchronous
mutable | immutable
ascending asc | descending desc
encode encrypt compress | decode decrypt decompress
import | export
upload | download
read | write
get | set
push | pull
input | output
client | server
frontend | backend
source origin departure depart | destination arrival
install | uninstall
mount | unmount
connect attach | disconnect detach
login | logout
subscribe | unsubscribe
follow | unfollow
mute | unmute
hide | show
expand | collapse
show reveal display | hide conceal
send give lend pay transfer | receive borrow collect
deposit | withdraw withdrawal
credit | debit
buy purchase buying bought | sell sale selling sold
income revenue profit | expense cost loss
asset | liability
gross | net
import imports | export exports
win won | lose lost
find found | lose lost
arrive arrived | leave left depart
come | go
enter | exit leave
push | pull
accept accepted | reject rejected decline declined
pass passed | fail failed
succeed success successful | fail failure
love like | hate dislike
love like | avoid
cause causes | prevent prevents cure treat
benefit benefits advantage advantages pro pros | risk risks disadvantage disadvantages con cons drawback drawbacks
similarity similarities same similar alike | difference differences different
first initial | last final | second | third
next upcoming | last previous past
previous | current | next
yesterday | today | tomorrow
past | present | future
morning | afternoon | evening | night
monday mon | tuesday | wednesday | thursday | friday | saturday | sunday
january jan | february feb | march | april | june | july | august | september sept | october oct | november nov | december dec
spring | summer | autumn | winter
daily | weekly | monthly | yearly annual annually | hourly | quarterly
weekday weekdays | weekend weekends
north northern | south southern | east eastern | west western
left | right
top | bottom
front | back rear
up upward upwards | down downward downwards
vertical | horizontal
row rows | column columns
male man men boy husband | female woman women girl wife
he him his | she her hers
mother mom mum mothers | father dad fathers | sister | brother | son | daughter | grandmother | grandfather | aunt | uncle
adult adults | child children kid kids
human humans | animal animals
dog dogs puppy | cat cats kitten
teacher | student
employer | employee
landlord | tenant
seller sender payer vendor | buyer recipient receiver payee customer
parent | child
host | guest
teach | learn
ask | answer
question | answer
cause | effect
life live alive living birth born | death die dead dying died
war | peace
day | night
sunrise | sunset
red | blue | green | yellow | black | white | orange | purple | pink | brown | grey gray
gold | silver | bronze
beef | pork | chicken | fish
breakfast | lunch | dinner
single once | double twice duplicate duplicated | triple thrice
half halve | double twice | quarter | triple
square squared sqrt quadratic | cube cubed cubic
noon midday | midnight
personal | business corporate
mild | severe
acute | chronic
dominant | recessive
singular | plural
noun | verb | adjective
active | passive
theory | practice
before | during | after
until till | since
minimum min | average mean median | maximum max
mean | median | mode
upgrade | downgrade
promote | demote
accelerate | decelerate brake
inhale | exhale
ascend climb | descend
attack | defend
create make build | destroy delete
assemble | disassemble
appear | disappear vanish
agree | disagree
trust | distrust
engage | disengage
inflate inflation | deflate deflation
immigrate immigration | emigrate emigration
export exporter | import importer
head | tail
prefix | suffix
uppercase | lowercase
absolute | relative
static | relative
serial sequential | parallel
lossy | lossless
stateful | stateless
supervised | unsupervised
gram-positive | gram-negative
visa | mastercard | amex maestro
android | iphone ios | windows | mac macos | linux
"""

_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "de", "mis", "anti", "re")

NEGATIONS = words(
    """
    not no never none nothing nobody nowhere neither nor cannot without unable hardly barely nope cant dont wont isnt
    arent wasnt werent didnt doesnt hasnt havent hadnt couldnt wouldnt shouldnt aint mustnt neednt nicht kein keine keinen
    keiner keines ohne nie pas jamais aucun sans nunca sin ningun non niet geen zonder inte utan
    """
)
"""Words that turn a sentence round; words with ``n't`` do so too."""

NOT_NEGATIONS = words(
    """
    know sure understand idea matter doubt
    """
)
"""After a negation they make no negated question: "I do not know how", "not sure whether", "no idea"."""

_UNITS_AND_TEENS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
"""
_TENS = """
twenty thirty forty fifty sixty seventy eighty ninety
"""
_ORDINALS = """
first second third fourth fifth sixth seventh eighth ninth tenth
"""
NUMBERS = {word: value for value, word in enumerate(_UNITS_AND_TEENS.split())}
NUMBERS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
SCALES = {"hundred": 100, "thousand": 1000, "k": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
ORDINALS = {word: value for value, word in enumerate(_ORDINALS.split(), 1)}

_UNITS = """
time: ms millisecond milliseconds; s sec secs second seconds; min mins minute minutes; h hr hrs hour hours; d day days
time: week weeks; month months; year years yr yrs; decade decades; century centuries
length: mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres
length: m meter meters metre metres; km kilometer kilometers kilometre kilometres kms; inch inches; ft foot feet
length: yard yards yd; mile miles mi
mass: mg milligram milligrams; g gram grams gramme grammes; kg kilogram kilograms kilo kilos kgs; lb lbs pound pounds
mass: oz ounce ounces; ton tons tonne tonnes; mcg microgram micrograms
volume: ml milliliter milliliters millilitre millilitres; l liter liters litre litres; gallon gallons; cup cups
volume: tbsp tablespoon tablespoons; tsp teaspoon teaspoons; pint pints
temperature: celsius centigrade; fahrenheit; kelvin
speed: mph; kph kmh
data: bit bits; byte bytes; kb kilobyte kilobytes; mb megabyte megabytes; gb gigabyte gigabytes; tb terabyte terabytes
data: kib; mib; gib
power: w watt watts; kw kilowatt kilowatts; kwh; mw; v volt volts; amp amps ampere; hz; khz; mhz; ghz; ohm ohms
power: joule joules; calorie calories; kcal
angle: degree degrees; radian radians
share: percent % pct percentage; bps
money: usd dollar dollars $ bucks; eur euro euros €; gbp pound pounds £ quid sterling; jpy yen ¥; inr rupee rupees ₹
money: cny yuan rmb; krw won; rub ruble rubles; chf franc francs; aud; cad; btc bitcoin bitcoins; eth ethereum
money: cent cents; pence
clock: am a.m; pm p.m
"""

_NAMES = """
afghanistan argentina australia austria bangladesh belgium brazil bulgaria cambodia cameroon canada chile china colombia
croatia cuba cyprus denmark ecuador egypt england estonia ethiopia europe finland france germany ghana greece greenland
hungary iceland india indonesia iran iraq ireland israel italy jamaica japan jordan kenya korea kuwait latvia lebanon libya
lithuania luxembourg malaysia malta mexico mongolia morocco nepal netherlands nigeria norway pakistan panama paraguay peru
philippines poland portugal qatar romania russia scotland senegal serbia singapore slovakia slovenia somalia spain sudan
sweden switzerland syria taiwan tanzania thailand tunisia uganda ukraine uruguay venezuela vietnam wales yemen zambia
zimbabwe africa asia america antarctica african american arabic argentinian asian australian austrian belgian brazilian
british bulgarian canadian chinese croatian cuban czech danish dutch egyptian english european finnish french german greek
hebrew hindi hungarian indian indonesian iranian irish israeli italian japanese korean latin mexican norwegian persian polish
portuguese romanian russian scottish serbian spanish swedish swiss thai turkish ukrainian urdu vietnamese welsh amsterdam
athens atlanta baghdad bangkok barcelona beijing berlin bombay boston brussels budapest cairo calcutta chicago copenhagen
dallas delhi denver detroit dubai dublin edinburgh florence frankfurt geneva glasgow hamburg hanoi helsinki houston istanbul
jakarta jerusalem johannesburg karachi kyiv lagos lima lisbon liverpool london lyon madrid manchester manila melbourne miami
milan montreal moscow mumbai munich nairobi naples osaka oslo paris philadelphia prague rome rotterdam santiago seattle seoul
shanghai shenzhen stockholm sydney tehran tokyo toronto vancouver venice vienna warsaw washington zurich california texas
florida alaska hawaii python java javascript typescript golang rust kotlin swift ruby perl php scala haskell matlab fortran
cobol bash powershell postgres postgresql mysql sqlite mongodb redis oracle cassandra kafka rabbitmq numpy pandas pytorch
tensorflow keras react angular vue svelte django flask fastapi spring rails docker kubernetes terraform ansible aws azure gcp
ubuntu debian fedora google microsoft apple amazon facebook meta twitter netflix tesla samsung sony intel nvidia amd ibm
paypal visa mastercard amex mercury venus mars jupiter saturn uranus neptune pluto ibuprofen paracetamol acetaminophen
tylenol aspirin advil insulin metformin penicillin amoxicillin naproxen codeine morphine
"""

NAMES = frozenset(_NAMES.split())
"""Names that are names in lower case and at the start of a sentence too."""

SAME_NAME = {
    "usa": "us",
    "u.s": "us",
    "u.s.a": "us",
    "uk": "gb",
    "britain": "gb",
    "postgresql": "postgres",
    "eur": "euro",
    "eu": "europe",
}
"""Other spellings of a name."""

FUNCTION_WORDS = words(
    """
    a an the this that these those there here it its is are was were be been being am do does did done doing have has had
    having will would shall should can could may might must ought i me my mine myself we us our ours you your yours u ur
    he him his she her they them their what which who whom whose when where why how if whether and or but so because as of
    for in at on to by with from into about than then please pls hi hello hey thanks thank ok okay just really very also
    too still yet already ever even only quite so s t m d ll ve re n im ive id tell know want wanna need like let lets
    help explain say says said get got going go gonna sure not no never any some one way ways possible able happen happens
    happened thing things something anything does
    """
)
"""Words that say little of what a question is about."""

QUESTIONS = {"who": "person", "whom": "person", "whose": "person", "when": "time", "where": "place", "why": "reason"}
"""Question words that ask for a kind of answer."""

MARKERS = words(
    """
    from to into onto than versus vs before after over under above below per by via between against
    """
)
"""Words after which stands what something is moved from, compared with, divided by."""

BEFORE_INFINITIVES = words(
    """
    need needs needed want wants wanted like able how have has had going possible try tried trying supposed ought wish
    love required allowed way what where when about refuse unable ready me you it fail failed
    """
)
"""A ``to`` after one of these begins a verb, not a place."""

PRONOUNS = words(
    """
    i me you we he she they him her them who
    """
)
"""Words of no content whose order tells who does what to whom."""

ENDINGS = words(
    """
    s y e al er or ion ation ication ment able ible ness ity ly ance ence ive ant ent ful ic ing ed
    """
)
"""Endings of forms of one word."""

_SYNONYMS = """
money cash funds
payment transaction
buy purchase bought
get receive obtain got
change modify edit alter update
fix repair resolve solve
fee cost price charge
make create
find locate
start begin
end finish
big large
small little
quick fast
wrong incorrect
error mistake
problem issue trouble difficulty
limit limitation restriction
multiple several
picture photo image
movie film
car automobile
phone cellphone smartphone
doctor physician
child kid
show display
answer reply respond
choose select pick
remove delete
decline reject refuse
best top
build construct
folder directory
advantage benefit
drawback disadvantage
calculate compute
recognise recognize
supply provide offer
country nation
abroad overseas
arrive come
delivery shipping
"""
SYNONYMS = {word: line.split()[0] for line in _SYNONYMS.strip().splitlines() for word in line.split()}
"""Words that may stand for each other; a short list, since a wrong one costs trust."""

PARTICLE_VERBS = words(
    """
    log logged logging sign signed signing opt opted opting check checked checking clock plug zoom fade phase cash
    """
)
"""Verbs whose ``in`` and ``out`` are opposites."""

HAN_NEGATIONS = frozenset("不没沒無无未别別勿莫非")
HAN_DIGITS = "零〇一二两三四五六七八九十百千万亿"
HAN_FILLERS = frozenset(
    "的了吗呢啊吧呀嘛我你您请問问怎么麼样樣如何什想要能可以会會是在和与與一个個下这這那哪儿里些为為被把就都也很吗有得着过"
)
HAN_ORDER = frozenset("从從到比把被向给給换換前后後对對和与除减")
_HAN_OPPOSITES = """
开 启 | 关 闭 停
增 加 升 涨 | 减 降 跌 少
前 | 后 後
上 | 下
左 | 右
大 | 小
多 | 少
高 | 低
长 | 短
快 | 慢
早 | 晚
新 | 旧 老
买 | 卖
进 入 | 出
存 | 取
借 | 还
男 他 | 女 她
冷 | 热
输 | 赢
真 对 | 假 错
加 | 减 | 乘 | 除
东 | 南 | 西 | 北
春 | 夏 | 秋 | 冬
昨 | 今 | 明
锁 | 解
禁 | 许
装 | 卸
奇 | 偶
生 | 死
爱 | 恨
"""


def _forms(word: str) -> list[str]:
    """Return a word with its regular endings; forms that do not exist do no harm."""
    if len(word) < 4 or not word.isalpha():
        return [word]
    stem = word.removesuffix("e")
    forms = [word, word + "s", word + "es", stem + "ed", stem + "ing", word + "ly"]
    if word[-1] == "y":
        forms += [word[:-1] + "ies", word[:-1] + "ied"]
    elif word[-1] not in "aeiouwx" and word[-2] in "aeiou":
        forms += [word + word[-1] + "ed", word + word[-1] + "ing"]
    if stem.endswith("at"):
        forms.append(stem + "ion")
    return forms


def _poles(table: str, *, inflect: bool) -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, line in enumerate(table.strip().splitlines()):
        sides = [side.split() for side in line.split("|")]
        if len(sides) == 1:
            sides = [[word] for word in sides[0]]
        for pole, words in enumerate(sides):
            for word in words:
                for form in _forms(word) if inflect else [word]:
                    entry = (kind, pole)
                    if entry not in found.setdefault(form, []):
                        found[form].append(entry)
    return {word: tuple(entries) for word, entries in found.items()}


def _units() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    names: dict[str, str] = {}
    kinds: dict[str, list[str]] = {}
    for line in _UNITS.strip().splitlines():
        kind, _, units = line.partition(":")
        for unit in units.split(";"):
            first, *others = unit.split()
            for word in (first, *others):
                # a pound is a weight and a currency: one name for both, of either kind
                name = names.setdefault(word, "pound" if word in ("pound", "pounds") else first)
                kinds.setdefault(name, [])
                if kind not in kinds[name]:
                    kinds[name].append(kind)
    return names, {name: tuple(of) for name, of in kinds.items()}


OPPOSITES = _poles(_OPPOSITES, inflect=True)
"""Word -> (class, pole): two questions that both name a pole of one class have to name the same."""
HAN_OPPOSITES = _poles(_HAN_OPPOSITES, inflect=False)
"""The same by character."""
HAN_PRONOUNS = frozenset("我你您他她它")
UNITS, UNIT_KINDS = _units()
"""Word -> name of the unit; name -> what it measures."""
NEGATIVE_PREFIXES = _PREFIXES
"""Before a word they make its opposite, or its repetition."""

# ruff: noqa: SIM905  (word lists read better as text)
"""Hold the small vocabulary that the generated dialogues draw from: lists only, no logic."""

NAMES = (
    "Ada Alan Grace Linus Anna Ben Clara David Emma Felix Greta Hugo Ida Jack Kate Leo Maria Nina Oscar Paula Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yuki Zoe Alice Bob Carol Dan Eve Frank Heidi Ivan Judy Mallory Olivia "
    "Peter Ravi Sara Tom Ursula Vera Will John Jane Mary Mike Max Mia Noah Liam Lucas Sophie Lena Paul Laura Omar "
    "Fatima Chen Wei Aisha Kofi Priya Arjun Elena Marco Luca Sofia Diego Carlos Pedro Ines Jonas Lars Erik Freya"
).split()
COLORS = "red blue green yellow orange purple pink brown black white grey turquoise gold silver violet crimson".split()
PETS = "cat dog rabbit hamster parrot goldfish turtle horse snake lizard pony canary".split()
CITIES = (
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Prague Dublin Athens Tokyo Cairo Lima Delhi Sydney Toronto "
    "Boston Chicago Zurich Geneva Munich Hamburg Milan Nairobi Seoul Kyoto Warsaw Helsinki Stockholm"
).split()
FOODS = "pizza pasta rice soup bread cheese salad curry sushi tacos pancakes noodles chocolate cake".split()
HOBBIES = "chess painting swimming reading cooking running gardening singing dancing cycling hiking sewing".split()
JOBS = "teacher doctor nurse baker engineer pilot farmer painter lawyer student writer gardener".split()

KINDS = {
    "fruit": "apple banana cherry grape lemon mango orange peach pear plum strawberry melon".split(),
    "animal": "cat dog horse cow sheep goat lion tiger bear wolf fox rabbit mouse owl duck frog".split(),
    "colour": "red blue green yellow orange purple pink brown black white grey".split(),
    "color": "red blue green yellow orange purple pink brown black white gray".split(),
    "city": CITIES,
    "vegetable": "carrot potato tomato onion pea bean cabbage spinach pepper cucumber".split(),
    "bird": "robin sparrow owl eagle hawk duck goose swan parrot crow".split(),
    "tool": "hammer saw drill wrench shovel rake axe knife brush ladder".split(),
    "instrument": "piano guitar violin flute drum trumpet harp cello organ banjo".split(),
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "sport": "football tennis chess swimming running rowing cycling golf hockey boxing".split(),
    "flower": "rose tulip daisy lily poppy violet orchid sunflower iris".split(),
    "country": "France Italy Spain Germany Japan Brazil Canada Egypt India Norway Kenya Peru".split(),
    "drink": "water tea coffee milk juice cocoa lemonade".split(),
    "name": NAMES[:30],
}
PLURALS = {"city": "cities", "country": "countries"}

THING_COLORS = {
    "sky": "blue", "grass": "green", "sun": "yellow", "snow": "white", "coal": "black", "blood": "red",
    "banana": "yellow", "lemon": "yellow", "cherry": "red", "strawberry": "red", "carrot": "orange",
    "pumpkin": "orange", "milk": "white", "chocolate": "brown", "sea": "blue", "leaf": "green", "frog": "green",
    "crow": "black", "swan": "white", "fire truck": "red", "elephant": "grey", "mouse": "grey", "flamingo": "pink",
    "tomato": "red", "cucumber": "green", "plum": "purple", "night": "black", "cloud": "white", "rose": "red",
}  # fmt: skip
SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "frog": "ribbit",
    "horse": "neigh", "pig": "oink", "bee": "buzz", "owl": "hoot", "mouse": "squeak", "snake": "hiss",
    "rooster": "cock-a-doodle-doo", "wolf": "howl", "bird": "tweet",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "happy": "sad", "fast": "slow",
    "light": "dark", "old": "new", "rich": "poor", "good": "bad", "high": "low", "open": "closed", "full": "empty",
    "hard": "soft", "wet": "dry", "long": "short", "strong": "weak", "early": "late", "loud": "quiet",
    "near": "far", "clean": "dirty", "easy": "difficult", "inside": "outside", "true": "false", "begin": "end",
    "love": "hate", "win": "lose", "push": "pull", "black": "white", "tall": "short", "thick": "thin",
    "yes": "no", "in": "out", "before": "after", "always": "never", "front": "back", "young": "old",
}  # fmt: skip
RHYMES = (
    "cat hat bat mat rat", "light night bright sight kite", "day play say way grey", "tree sea bee key free",
    "moon soon spoon tune June", "star car far jar", "house mouse blouse", "ring sing king spring wing",
    "cold gold old told bold", "rain train plane chain lane", "book cook look hook", "blue true new shoe two",
    "sky fly high by cry", "ball tall wall small fall", "snow go slow grow show", "cake lake make take snake",
    "heart art start part", "dream stream team cream", "fun sun run one done", "stone alone phone bone",
    "bear chair hair care pear", "fish dish wish", "page cage stage age", "store more door four floor",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "England": "London",
    "Austria": "Vienna", "Norway": "Oslo", "Portugal": "Lisbon", "Ireland": "Dublin", "Greece": "Athens",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "India": "New Delhi", "Canada": "Ottawa",
    "China": "Beijing", "Russia": "Moscow", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Hungary": "Budapest", "Kenya": "Nairobi", "Brazil": "Brasilia", "Mexico": "Mexico City",
    "Australia": "Canberra", "Belgium": "Brussels", "Cuba": "Havana", "Turkey": "Ankara", "Switzerland": "Bern",
    "South Korea": "Seoul", "the Netherlands": "Amsterdam", "the United States": "Washington",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()

SPELLABLE = (
    "banana apple orange hello world computer house garden river mountain window table chair school friend "
    "summer winter kitchen library machine elephant dragon castle forest island bridge pencil butter cheese yellow "
    "purple silver planet rocket engine cache page memory token model python string letter number question answer "
    "coffee teacher doctor morning evening music dance flower tree bird horse tiger monkey rabbit water fire "
    "earth wind cloud thunder star moon happy little quick brown jumps lazy beautiful wonderful strange quiet"
).split()

HEROES = (
    "dragon robot fox wizard knight princess cat dog pirate bear mouse sailor girl boy king queen owl turtle witch "
    "astronaut baker farmer ghost giant wolf rabbit horse inventor gardener unicorn penguin frog painter detective"
).split()
HERO_NAMES = "Pip Mira Bruno Luna Otto Finn Ruby Hazel Milo Nell Tilda Rufus Willow Basil Juno Edda Kai Sunny".split()
TRAITS = "brave curious shy clever lonely cheerful sleepy gentle stubborn hungry tiny patient clumsy kind".split()
PLACES = (
    "a quiet village by the sea|a castle on a hill|the middle of a dark forest|an old lighthouse|a town of glass|"
    "a cave behind a waterfall|a small island|a city of bridges|the edge of the desert|a snowy valley|"
    "a library with a thousand doors|a garden on the moon|a house made of books|a ship that never landed"
).split("|")
TREASURES = (
    "a silver key|a golden map|a broken clock|a glowing stone|an empty book|a blue feather|a box with no lid|"
    "a bell that made no sound|a paper boat|a lost letter|a tiny lantern|a red umbrella|a seed as big as a fist"
).split("|")

"""The closed world that the demo model knows: a few hundred small facts.

Plain tables, nothing else: which capital belongs to which country, what kind of thing a robin is. How facts
are put into words is in `phrasings`; which of those combinations a model may see while it is trained is in
`split`.
"""

from __future__ import annotations

# country: (capital, main language, continent)
COUNTRIES: dict[str, tuple[str, str, str]] = {
    "France": ("Paris", "French", "Europe"),
    "Germany": ("Berlin", "German", "Europe"),
    "Italy": ("Rome", "Italian", "Europe"),
    "Spain": ("Madrid", "Spanish", "Europe"),
    "Portugal": ("Lisbon", "Portuguese", "Europe"),
    "England": ("London", "English", "Europe"),
    "Ireland": ("Dublin", "English", "Europe"),
    "Austria": ("Vienna", "German", "Europe"),
    "Poland": ("Warsaw", "Polish", "Europe"),
    "Greece": ("Athens", "Greek", "Europe"),
    "Hungary": ("Budapest", "Hungarian", "Europe"),
    "Norway": ("Oslo", "Norwegian", "Europe"),
    "Sweden": ("Stockholm", "Swedish", "Europe"),
    "Denmark": ("Copenhagen", "Danish", "Europe"),
    "Finland": ("Helsinki", "Finnish", "Europe"),
    "Iceland": ("Reykjavik", "Icelandic", "Europe"),
    "Romania": ("Bucharest", "Romanian", "Europe"),
    "Bulgaria": ("Sofia", "Bulgarian", "Europe"),
    "Croatia": ("Zagreb", "Croatian", "Europe"),
    "Ukraine": ("Kyiv", "Ukrainian", "Europe"),
    "Russia": ("Moscow", "Russian", "Europe"),
    "Turkey": ("Ankara", "Turkish", "Asia"),
    "Iran": ("Tehran", "Persian", "Asia"),
    "Iraq": ("Baghdad", "Arabic", "Asia"),
    "Jordan": ("Amman", "Arabic", "Asia"),
    "Japan": ("Tokyo", "Japanese", "Asia"),
    "China": ("Beijing", "Chinese", "Asia"),
    "India": ("New Delhi", "Hindi", "Asia"),
    "Nepal": ("Kathmandu", "Nepali", "Asia"),
    "Thailand": ("Bangkok", "Thai", "Asia"),
    "Vietnam": ("Hanoi", "Vietnamese", "Asia"),
    "Mongolia": ("Ulaanbaatar", "Mongolian", "Asia"),
    "South Korea": ("Seoul", "Korean", "Asia"),
    "Egypt": ("Cairo", "Arabic", "Africa"),
    "Morocco": ("Rabat", "Arabic", "Africa"),
    "Kenya": ("Nairobi", "Swahili", "Africa"),
    "Ghana": ("Accra", "English", "Africa"),
    "Ethiopia": ("Addis Ababa", "Amharic", "Africa"),
    "Senegal": ("Dakar", "French", "Africa"),
    "Angola": ("Luanda", "Portuguese", "Africa"),
    "Canada": ("Ottawa", "English", "North America"),
    "Mexico": ("Mexico City", "Spanish", "North America"),
    "Cuba": ("Havana", "Spanish", "North America"),
    "Jamaica": ("Kingston", "English", "North America"),
    "Brazil": ("Brasilia", "Portuguese", "South America"),
    "Argentina": ("Buenos Aires", "Spanish", "South America"),
    "Chile": ("Santiago", "Spanish", "South America"),
    "Peru": ("Lima", "Spanish", "South America"),
    "Colombia": ("Bogota", "Spanish", "South America"),
    "Australia": ("Canberra", "English", "Oceania"),
    "New Zealand": ("Wellington", "English", "Oceania"),
}

# animal: (kind, legs, sound or food, whether it can fly)
ANIMALS: dict[str, tuple[str, int, str, bool]] = {
    "dog": ("mammal", 4, "meat", False),
    "cat": ("mammal", 4, "fish", False),
    "cow": ("mammal", 4, "grass", False),
    "horse": ("mammal", 4, "hay", False),
    "sheep": ("mammal", 4, "grass", False),
    "goat": ("mammal", 4, "leaves", False),
    "rabbit": ("mammal", 4, "carrots", False),
    "mouse": ("mammal", 4, "grain", False),
    "bear": ("mammal", 4, "honey", False),
    "fox": ("mammal", 4, "mice", False),
    "wolf": ("mammal", 4, "meat", False),
    "lion": ("mammal", 4, "meat", False),
    "deer": ("mammal", 4, "leaves", False),
    "bat": ("mammal", 2, "insects", True),
    "whale": ("mammal", 0, "plankton", False),
    "dolphin": ("mammal", 0, "fish", False),
    "hen": ("bird", 2, "grain", False),
    "duck": ("bird", 2, "plants", True),
    "goose": ("bird", 2, "grass", True),
    "owl": ("bird", 2, "mice", True),
    "eagle": ("bird", 2, "rabbits", True),
    "robin": ("bird", 2, "worms", True),
    "parrot": ("bird", 2, "seeds", True),
    "penguin": ("bird", 2, "fish", False),
    "ostrich": ("bird", 2, "plants", False),
    "salmon": ("fish", 0, "shrimps", False),
    "trout": ("fish", 0, "insects", False),
    "shark": ("fish", 0, "fish", False),
    "snake": ("reptile", 0, "mice", False),
    "lizard": ("reptile", 4, "insects", False),
    "turtle": ("reptile", 4, "plants", False),
    "frog": ("amphibian", 4, "insects", False),
    "newt": ("amphibian", 4, "worms", False),
    "bee": ("insect", 6, "nectar", True),
    "ant": ("insect", 6, "seeds", False),
    "butterfly": ("insect", 6, "nectar", True),
    "beetle": ("insect", 6, "plants", True),
}

YOUNG: dict[str, str] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "goat": "kid",
    "bear": "cub",
    "hen": "chick", "duck": "duckling", "goose": "gosling", "frog": "tadpole", "deer": "fawn", "owl": "owlet",
    "eagle": "eaglet", "butterfly": "caterpillar",
}  # fmt: skip

COLORS: dict[str, str] = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "milk": "white", "gold": "yellow",
    "chocolate": "brown", "the sky": "blue", "the sun": "yellow", "a lemon": "yellow", "a banana": "yellow",
    "a tomato": "red", "a strawberry": "red", "a carrot": "orange", "a pumpkin": "orange", "a plum": "purple",
    "an elephant": "gray", "a crow": "black", "a flamingo": "pink", "a frog": "green", "salt": "white",
    "ink": "black", "a leaf": "green", "the sea": "blue", "a violet": "purple", "a pig": "pink",
}  # fmt: skip

OPPOSITES: dict[str, str] = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "old": "young", "happy": "sad",
    "light": "dark",
    "full": "empty", "open": "closed", "hard": "soft", "wet": "dry", "rich": "poor", "strong": "weak",
    "early": "late", "loud": "quiet", "long": "short", "wide": "narrow", "clean": "dirty", "up": "down",
    "left": "right", "day": "night", "near": "far", "inside": "outside", "first": "last", "begin": "end",
    "sweet": "sour", "thick": "thin", "deep": "shallow", "sharp": "blunt", "brave": "afraid",
}  # fmt: skip

JOBS: dict[str, str] = {
    "baker": "bread", "tailor": "clothes", "potter": "pots", "poet": "poems", "painter": "pictures",
    "carpenter": "furniture", "brewer": "beer", "shoemaker": "shoes", "jeweler": "rings", "composer": "music",
    "blacksmith": "horseshoes", "beekeeper": "honey", "winemaker": "wine", "architect": "house plans",
    "programmer": "software", "weaver": "cloth",
}  # fmt: skip

# group: members, in the one order in which the model names them
GROUPS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "orange", "pear", "plum"),
    "vegetables": ("carrot", "potato", "onion", "pea", "bean", "cabbage", "leek", "spinach"),
    "animals": ("dog", "cat", "cow", "horse", "sheep", "rabbit", "bear", "fox"),
    "birds": ("owl", "eagle", "robin", "duck", "goose", "parrot", "penguin", "hen"),
    "colors": ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown"),
    "tools": ("hammer", "saw", "drill", "wrench", "pliers", "chisel", "ax", "file"),
    "trees": ("oak", "pine", "birch", "maple", "ash", "elm", "willow", "cedar"),
    "instruments": ("piano", "violin", "guitar", "flute", "drum", "trumpet", "harp", "cello"),
    "metals": ("iron", "gold", "silver", "copper", "tin", "lead", "zinc", "nickel"),
    "sports": ("football", "tennis", "hockey", "golf", "rowing", "boxing", "cycling", "judo"),
    "drinks": ("water", "milk", "tea", "coffee", "juice", "cocoa", "lemonade", "soda"),
    "flowers": ("rose", "tulip", "lily", "daisy", "violet", "iris", "poppy", "lilac"),
}

# series: members in their natural order
SERIES: dict[str, tuple[str, ...]] = {
    "days": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "months": ("January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October",
               "November", "December"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "letters": tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
}  # fmt: skip

NAMES: tuple[str, ...] = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
    "Noah",
    "Olive", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Xavier", "Yara", "Zoe",
    "Alice",
    "Bob", "Carol", "Dora", "Eric", "Fiona", "George", "Hanna", "Ivan", "Julia", "Karl", "Lucy", "Max",
    "Nina",
    "Oscar", "Petra", "Ralph", "Sara", "Tom", "Ursula", "Vera", "Will",
)  # fmt: skip

CITIES: tuple[str, ...] = tuple(capital for capital, _, _ in COUNTRIES.values())


def with_article(noun: str) -> str:
    """The noun after its indefinite article: `an owl`, `a dog`."""
    return f"{'an' if noun[0] in 'aeiouAEIO' else 'a'} {noun}"

"""Hold the few facts of the world that the model learns."""

from random import Random

from chatcache.builtin.text import Turn, ask

TRIVIA: tuple[tuple[str, str], ...] = (
    ("how many days are in a week?|how many days does a week have?", "A week has seven days."),
    ("how many months are in a year?|how many months does a year have?", "A year has twelve months."),
    ("how many days are in a year?|how many days does a year have?", "A year has 365 days, and a leap year has 366."),
    ("how many hours are in a day?|how many hours does a day have?", "A day has 24 hours."),
    ("how many minutes are in an hour?", "An hour has 60 minutes."),
    ("how many seconds are in a minute?", "A minute has 60 seconds."),
    ("how many legs does a spider have?", "A spider has eight legs."),
    ("how many legs does a dog have?|how many legs does a cat have?", "It has four legs."),
    ("how many legs does an insect have?|how many legs does an ant have?", "Insects have six legs."),
    ("how many letters are in the alphabet?", "The alphabet has 26 letters."),
    ("how many planets are there?|how many planets are in the solar system?", "There are eight planets."),
    ("what is the largest planet?|which planet is the biggest?", "Jupiter is the largest planet."),
    ("what is the highest mountain?|what is the tallest mountain?", "Mount Everest is the highest mountain."),
    ("what is the largest ocean?|which ocean is the biggest?", "The Pacific is the largest ocean."),
    ("what do bees make?|who makes honey?", "Bees make honey."),
    ("what do cows drink?", "Cows drink water."),
    ("what is ice?|what is ice made of?", "Ice is frozen water."),
    ("what is the meaning of life?|what is the answer to everything?", "Some say 42. I am too small to know better."),
    (
        "say the alphabet|what is the alphabet?|recite the alphabet",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (
        "what are the days of the week?|list the days of the week|name the days of the week",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        "what are the months of the year?|list the months|name all months|name the twelve months",
        "January, February, March, April, May, June, July, August, September, October, November and December.",
    ),
    ("what are the seasons?|name the four seasons|list the seasons", "Spring, summer, autumn and winter."),
    ("what is water?|what is water made of?", "Water is made of hydrogen and oxygen."),
    ("what is the sun?", "The sun is a star, and the earth travels around it."),
    ("what is the moon?", "The moon travels around the earth."),
    ("what is python?", "Python is a programming language. I can write very small programs in it."),
    ("what is a computer?", "A computer is a machine that follows programs."),
)


def trivia(rng: Random) -> Turn:
    """Ask one of the few facts of the world that the model learns."""
    questions, answer = rng.choice(TRIVIA)
    return Turn(ask(rng, questions), answer)

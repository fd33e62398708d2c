"""Tables of what the model knows of the world. All are closed; the model learns them by heart."""

CAPITALS = dict(x.split(":")
                for x in """France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon England:London Britain:London Ireland:Dublin
Scotland:Edinburgh
Wales:Cardiff Netherlands:Amsterdam Belgium:Brussels Luxembourg:Luxembourg Switzerland:Bern Austria:Vienna Poland:Warsaw Czechia:Prague
Slovakia:Bratislava Hungary:Budapest
Romania:Bucharest Bulgaria:Sofia Greece:Athens Turkey:Ankara Russia:Moscow Ukraine:Kyiv Finland:Helsinki Sweden:Stockholm Norway:Oslo
Denmark:Copenhagen Iceland:Reykjavik
Estonia:Tallinn Latvia:Riga Lithuania:Vilnius Croatia:Zagreb Serbia:Belgrade Slovenia:Ljubljana Albania:Tirana Malta:Valletta Cyprus:Nicosia
Japan:Tokyo China:Beijing
India:New_Delhi Pakistan:Islamabad Nepal:Kathmandu Bangladesh:Dhaka Thailand:Bangkok Vietnam:Hanoi Indonesia:Jakarta Malaysia:Kuala_Lumpur
Singapore:Singapore
Philippines:Manila Mongolia:Ulaanbaatar Iran:Tehran Iraq:Baghdad Israel:Jerusalem Jordan:Amman Lebanon:Beirut Syria:Damascus Saudi_Arabia:Riyadh
Qatar:Doha Afghanistan:Kabul
Egypt:Cairo Morocco:Rabat Algeria:Algiers Tunisia:Tunis Libya:Tripoli Kenya:Nairobi Ethiopia:Addis_Ababa Nigeria:Abuja Ghana:Accra Senegal:Dakar
Uganda:Kampala Tanzania:Dodoma
Rwanda:Kigali Canada:Ottawa Mexico:Mexico_City Cuba:Havana Jamaica:Kingston Brazil:Brasilia Argentina:Buenos_Aires Chile:Santiago Peru:Lima
Colombia:Bogota Venezuela:Caracas
Ecuador:Quito Bolivia:Sucre Uruguay:Montevideo Paraguay:Asuncion Australia:Canberra New_Zealand:Wellington South_Korea:Seoul North_Korea:Pyongyang""".replace("\n",
    " ").split())
CAPITALS = {k.replace("_", " "): v.replace("_", " ") for k, v in CAPITALS.items()} | {"the United States": "Washington", "the USA": "Washington",
    "the UK": "London", "the Netherlands": "Amsterdam"}
CONTINENTS = {"Europe": "France Germany Italy Spain Portugal Poland Greece Norway Sweden Finland Austria Ireland Hungary Denmark Belgium Switzerland",
              "Asia": "Japan China India Thailand Vietnam Nepal Mongolia Pakistan Iran Iraq Indonesia",
              "Africa": "Egypt Kenya Nigeria Morocco Ghana Ethiopia Senegal Uganda",
              "South America": "Brazil Argentina Chile Peru Colombia Bolivia Ecuador", "North America": "Canada Mexico Cuba"}
SPOKEN = {"France": "French", "Germany": "German", "Italy": "Italian", "Spain": "Spanish", "Portugal": "Portuguese", "Japan": "Japanese",
          "China": "Chinese", "Brazil": "Portuguese",
          "Mexico": "Spanish", "Austria": "German", "Argentina": "Spanish", "Poland": "Polish", "Greece": "Greek", "Russia": "Russian",
          "Egypt": "Arabic", "Sweden": "Swedish", "England": "English", "Australia": "English"}
MONEY = {"Japan": "the yen", "Britain": "the pound", "England": "the pound", "Germany": "the euro", "France": "the euro", "Italy": "the euro",
         "Spain": "the euro", "the USA": "the dollar",
         "Switzerland": "the franc", "India": "the rupee", "China": "the yuan", "Russia": "the ruble", "Poland": "the zloty", "Mexico": "the peso",
         "Brazil": "the real", "Turkey": "the lira", "Sweden": "the krona"}

# topic (as asked) → one sentence. Answers add that this is all.
DEFINED = {
    "quantum computing": "A quantum computer works with quantum bits, which can be 0 and 1 at the same time",
    "quantum physics": "Quantum physics describes very small things, such as atoms and light",
    "quantum mechanics": "Quantum mechanics describes very small things, such as atoms and light",
    "gravity": "Gravity pulls things toward each other; it keeps us on the ground and the moon near the earth",
    "photosynthesis": "Plants use sunlight to make sugar and oxygen from water and air; that is photosynthesis",
    "evolution": "Evolution means that living things change slowly, because the fittest have more young",
    "electricity": "Electricity is the flow of tiny charges, for example through a wire",
    "relativity": "Einstein's relativity says that time and space depend on how fast you move",
    "the theory of relativity": "Einstein's theory of relativity says that time and space depend on how fast you move",
    "DNA": "DNA is the long molecule in our cells that holds the plan of the body",
    "a black hole": "A black hole is so heavy and dense that not even light can leave it",
    "black holes": "Black holes are so heavy and dense that not even light can leave them",
    "an atom": "An atom is the smallest part of an element: a tiny core with electrons around it",
    "atoms": "Atoms are the tiny parts that all things are made of",
    "artificial intelligence": "Artificial intelligence is about programs that do things that seem to need a mind",
    "AI": "AI is short for artificial intelligence: programs that do things that seem to need a mind",
    "machine learning": "In machine learning a program learns from examples instead of fixed rules",
    "deep learning": "Deep learning trains neural networks with many layers on many examples",
    "a neural network": "A neural network is many simple units in layers; training sets the numbers between them",
    "neural networks": "Neural networks are many simple units in layers; training sets the numbers between them",
    "a language model": "A language model guesses the next word of a text, again and again",
    "an LLM": "An LLM is a large language model: it guesses the next word of a text, again and again",
    "LLM": "An LLM is a large language model: it guesses the next word of a text, again and again",
    "a large language model": "A large language model guesses the next word of a text, again and again",
    "a transformer": "A transformer is a neural network in which every word can look at the words before it",
    "attention": "Attention lets a model look back at the earlier words that matter for the next one",
    "a token": "A token is a word or a piece of a word; language models read and write tokens",
    "tokens": "Tokens are words or pieces of words; language models read and write them",
    "quantization": "Quantization stores the numbers of a model with fewer bits, so that it becomes smaller",
    "a GPU": "A GPU is a chip that does many small calculations at once",
    "a CPU": "The CPU is the main chip of a computer; it carries out programs step by step",
    "RAM": "RAM is the fast memory of a computer; it forgets everything without power",
    "an SSD": "An SSD stores data on chips without moving parts, much faster than an old hard disk",
    "GGUF": "GGUF is a file format for language models; I live in such a file myself",
    "inference": "Inference means running a trained model to get answers",
    "temperature": "Temperature says how daring a model picks its words: 0 always takes the likeliest",
    "a router": "In a Mixture-of-Experts model the router picks the experts that work on a token",
    "sampling": "Sampling means picking the next word by chance, the likely ones more often",
    "a KV cache": "The KV cache keeps what a model computed for earlier tokens, so that it need not do it again",
    "the KV cache": "The KV cache keeps what a model computed for earlier tokens, so that it need not do it again",
    "Python": "Python is a programming language that is easy to read",
    "Rust": "Rust is a programming language for fast programs that do not crash on memory errors; moeflux is written in it",
    "JavaScript": "JavaScript is the programming language of web pages",
    "Linux": "Linux is a free operating system that runs on phones, servers and laptops",
    "git": "Git keeps the history of files, so that many people can work on them",
    "open source": "Open source programs may be read, used and changed by everybody",
    "the internet": "The internet connects computers all over the world",
    "an algorithm": "An algorithm is a list of exact steps that solves a problem",
    "a computer": "A computer is a machine that follows programs", "a program": "A program is a list of instructions for a computer",
    "a bug": "A bug is a mistake in a program", "a database": "A database stores data so that they are quickly found again",
    "blockchain": "A blockchain is a list of records that many computers keep and that is hard to change",
    "bitcoin": "Bitcoin is digital money that no bank controls", "cryptocurrency": "Cryptocurrency is digital money secured by mathematics",
    "an API": "An API is the way in which one program talks to another", "the cloud": "The cloud is a polite word for other people's computers",
    "HTML": "HTML is the language that web pages are written in",
    "democracy": "In a democracy the people choose who governs", "inflation": "Inflation means that prices rise and money buys less",
    "philosophy": "Philosophy asks the big questions: what is true, what is good, what can we know",
    "global warming": "Global warming means that the earth gets warmer, mostly because we burn coal, oil and gas",
    "energy": "Energy is what makes things move, glow or get warm", "light": "Light is a wave that our eyes can see; nothing is faster",
    "water": "Water is made of hydrogen and oxygen; we drink it", "air": "Air is mostly nitrogen, with some oxygen that we breathe",
    "fire": "Fire is burning gas that gives light and heat", "snow": "Snow is frozen water that falls from clouds",
    "rain": "Rain is water that falls from clouds", "a cloud": "A cloud is made of tiny drops of water in the air",
    "a rainbow": "A rainbow appears when the sun shines through drops of rain", "thunder": "Thunder is the sound of lightning",
    "lightning": "Lightning is a huge spark between clouds and the ground", "the moon": "The moon is a ball of rock that goes around the earth",
    "the sun": "The sun is a star, a huge ball of hot gas", "a star": "A star is a huge ball of hot, glowing gas",
    "a planet": "A planet is a big ball that goes around a star", "the earth": "The earth is the planet that we live on",
    "a volcano": "A volcano is a mountain from which hot, melted rock can come",
    "an earthquake": "In an earthquake the ground shakes because rock moves deep below",
    "the universe": "The universe is everything that there is: all space, time, stars and us", "time": "Time is what clocks measure",
    "love": "Love is when somebody else matters to you as much as you do", "happiness": "Happiness may be a warm cup of tea and a good story",
    "the meaning of life": "Some say that it is 42; my stories say that it is friendship", "music": "Music is sound put in a beautiful order",
    "a poem": "A poem is a short text in which every word counts, often with rhymes",
    "a haiku": "A haiku is a poem of three lines with 5, 7 and 5 syllables", "a noun": "A noun is a word for a thing, a person or a place",
    "a verb": "A verb is a word for doing, such as run or sing", "an adjective": "An adjective says how something is, such as red or small",
    "a prime number": "A prime number can be divided only by 1 and itself, such as 7",
    "pi": "Pi is about 3.14159; it is the length of a circle divided by its width", "an even number": "An even number can be divided by 2",
    "a triangle": "A triangle has three sides", "a square": "A square has four equal sides",
    "zero": "Zero is the number of nothing", "infinity": "Infinity is more than any number",
    "the heart": "The heart pumps the blood through the body", "the brain": "The brain is the part of the body that thinks",
    "a dinosaur": "Dinosaurs were huge animals that died out long ago",
    "a mammal": "A mammal is an animal that drinks milk when it is young", "an insect": "An insect is a small animal with six legs",
    "a reptile": "A reptile is an animal with scales, such as a snake", "chess": "Chess is a game of two kings, with 16 pieces on each side",
    "football": "In football two teams try to kick a ball into a goal", "Christmas": "Christmas is a feast in December with presents and candles",
    "a friend": "A friend is somebody who likes you and stays when it rains",
    "the Fibonacci sequence": "In the Fibonacci sequence each number is the sum of the two before: 1, 1, 2, 3, 5, 8, 13",
    "fibonacci": "In the Fibonacci sequence each number is the sum of the two before: 1, 1, 2, 3, 5, 8, 13",
    "recursion": "Recursion means that something is defined by itself; see recursion",
    "JSON": "JSON is a way to write data as text, with names and values", "a vector": "A vector is a list of numbers",
    "a matrix": "A matrix is a table of numbers",
}

# (wordings, answer, key words)
SINGLE: list[tuple[tuple[str, ...], str, str]] = [
    (("why is the sky blue?", "why does the sky look blue?", "what makes the sky blue?", "reason for the blue sky"),
     "Air scatters blue light more than red light, so the sky looks blue.", "light"),
    (("who was einstein?", "who is albert einstein?", "tell me about einstein", "who was albert einstein", "einstein"),
     "Albert Einstein was a physicist who found the theory of relativity.", "physicist"),
    (("who wrote romeo and juliet?", "who wrote hamlet?", "who is shakespeare?", "author of romeo and juliet", "who wrote macbeth",
      "who was william shakespeare?"), "William Shakespeare, who wrote Romeo and Juliet, Hamlet and many other plays.", "Shakespeare"),
    (("who painted the mona lisa?", "who was leonardo da vinci?", "mona lisa painter", "who made the mona lisa"),
     "Leonardo da Vinci painted the Mona Lisa.", "Leonardo"),
    (("what is the speed of light?", "how fast is light?", "speed of light"), "Light travels about 300,000 kilometers in a second.", "300,000"),
    (("at what temperature does water boil?", "boiling point of water", "when does water boil?", "how hot is boiling water?"),
     "Water boils at 100 degrees Celsius.", "100"),
    (("at what temperature does water freeze?", "freezing point of water", "when does water freeze?", "when does water turn to ice?"),
     "Water freezes at 0 degrees Celsius.", "0"),
    (("what is the largest ocean?", "biggest ocean", "which ocean is the biggest?", "name the largest ocean", "largest ocean in the world"),
     "The Pacific is the largest ocean.", "Pacific"),
    (("what is the highest mountain?", "tallest mountain in the world", "highest mountain on earth?", "what is the tallest mountain?",
      "biggest mountain"), "Mount Everest is the highest mountain.", "Everest"),
    (("what is the longest river?", "longest river in the world", "which river is the longest?"), "The Nile is usually called the longest river.",
     "Nile"),
    (("what is the largest country?", "biggest country in the world", "which country is the biggest?"), "Russia is the largest country.", "Russia"),
    (("what is the largest animal?", "biggest animal in the world", "which animal is the biggest?", "what's the biggest animal"),
     "The blue whale is the largest animal.", "whale"),
    (("what is the fastest animal?", "fastest land animal", "which animal is the fastest?"), "The cheetah is the fastest animal on land.", "cheetah"),
    (("what is the tallest animal?", "which animal is the tallest?", "tallest animal"), "The giraffe is the tallest animal.", "giraffe"),
    (("what is the largest planet?", "biggest planet", "which planet is the biggest?"), "Jupiter is the largest planet.", "Jupiter"),
    (("which planet is closest to the sun?", "closest planet to the sun", "what is the nearest planet to the sun?"), "Mercury is closest to the sun.",
     "Mercury"),
    (("which planet is red?", "what is the red planet?", "the red planet"), "Mars is called the red planet.", "Mars"),
    (("how many planets are there?", "number of planets", "how many planets are in the solar system?", "how many planets does the sun have"),
     "There are 8 planets in the solar system.", "8"),
    (("name the planets", "list the planets", "what are the planets?", "planets of the solar system", "list all planets",
      "tell me the names of the planets"), "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune.", "Neptune"),
    (("how many continents are there?", "number of continents", "how many continents does the earth have?"), "There are 7 continents.", "7"),
    (("name the continents", "list the continents", "what are the continents?", "list all continents"),
     "Africa, Antarctica, Asia, Australia, Europe, North America, South America.", "Asia"),
    (("name the oceans", "list the oceans", "what are the oceans?", "how many oceans are there?"),
     "There are 5 oceans: Pacific, Atlantic, Indian, Southern and Arctic.", "Atlantic"),
    (("name the seasons", "what are the seasons?", "list the four seasons", "how many seasons are there?", "seasons"),
     "There are 4 seasons: spring, summer, autumn and winter.", "winter"),
    (("what are the colors of the rainbow?", "colors of the rainbow", "name the colours of the rainbow", "list the colors of a rainbow",
      "rainbow colors"), "Red, orange, yellow, green, blue, indigo, violet.", "indigo"),
    (("what are the primary colors?", "name the primary colors", "primary colors", "list the primary colours"), "Red, yellow and blue.", "yellow"),
    (("name the five senses", "what are the five senses?", "list the senses", "how many senses do we have?"),
     "The five senses are sight, hearing, smell, taste and touch.", "taste"),
    (("what are the vowels?", "name the vowels", "list the vowels", "vowels"), "The vowels are a, e, i, o and u.", "a, e, i"),
    (("how many letters are in the alphabet?", "how many letters does the alphabet have?", "number of letters in the alphabet"),
     "The English alphabet has 26 letters.", "26"),
    (("how many days are in a year?", "days in a year", "how many days does a year have?"), "A year has 365 days, a leap year 366.", "365"),
    (("how many weeks are in a year?", "weeks in a year", "how many weeks does a year have?"), "A year has 52 weeks.", "52"),
    (("how many seconds are in a minute?", "seconds in a minute"), "A minute has 60 seconds.", "60"),
    (("how many seconds are in an hour?", "seconds in an hour"), "An hour has 3600 seconds.", "3600"),
    (("how many centimeters are in a meter?", "how many cm in a meter?", "centimeters in a meter"), "A meter has 100 centimeters.", "100"),
    (("how many meters are in a kilometer?", "how many m in a km", "meters in a kilometer"), "A kilometer has 1000 meters.", "1000"),
    (("how many grams are in a kilogram?", "how many g in a kg", "grams in a kilo"), "A kilogram has 1000 grams.", "1000"),
    (("how many bits are in a byte?", "bits in a byte", "how many bits does a byte have?"), "A byte has 8 bits.", "8"),
    (("how many is a dozen?", "what is a dozen?", "how much is a dozen?"), "A dozen is 12.", "12"),
    (("how many fingers do i have?", "how many fingers does a hand have?", "how many fingers are on a hand?"), "A hand has 5 fingers.", "5"),
    (("how many states are in the usa?", "how many us states are there?", "number of states in the usa"), "The USA has 50 states.", "50"),
    (("what is h2o?", "chemical formula of water", "what is the formula of water?", "h2o"), "H2O is water.", "H2O"),
    (("what came first, the chicken or the egg?", "chicken or egg?", "which came first the chicken or the egg"),
     "The egg, says my alphabet only after the chicken.", "egg"),
    (("what is the answer to life, the universe and everything?", "answer to life the universe and everything", "why 42?", "what is 42?"),
     "It is 42, as everybody knows.", "42"),
    (("is the earth flat?", "is the earth round?", "what shape is the earth?", "shape of the earth"), "The earth is round, almost like a ball.",
     "round"),
    (("do fish sleep?", "can fish sleep?"), "Yes, fish rest, but they have no eyelids to close.", "rest"),
    (("can penguins fly?", "do penguins fly?", "why can't penguins fly?"), "No, penguins cannot fly, but they swim very well.", "swim"),
    (("can pigs fly?", "do pigs fly?"), "Only in stories. Shall I tell you one about a pig?", "stories"),
    (("is a tomato a fruit?", "is a tomato a vegetable?", "tomato fruit or vegetable?"), "A tomato is a fruit, even if we cook it like a vegetable.",
     "fruit"),
    (("who was the first man on the moon?", "first person on the moon", "who walked on the moon first?", "who landed on the moon first"),
     "Neil Armstrong was the first man on the moon, in 1969.", "Armstrong"),
    (("when was the moon landing?", "year of the moon landing", "when did people land on the moon?"), "The first people landed on the moon in 1969.",
     "1969"),
    (("when did world war 2 end?", "when did the second world war end?", "end of world war 2", "when did ww2 end"),
     "The Second World War ended in 1945.", "1945"),
    (("when did the titanic sink?", "what year did the titanic sink", "titanic"), "The Titanic sank in 1912.", "1912"),
    (("who discovered america?", "who found america?", "when was america discovered?"),
     "Columbus sailed to America in 1492; people already lived there.", "Columbus"),
    (("who invented the telephone?", "inventor of the telephone", "who made the first telephone?"),
     "Alexander Graham Bell is known for the telephone.", "Bell"),
    (("who invented the light bulb?", "inventor of the light bulb", "who made the light bulb"), "Thomas Edison is known for the light bulb.",
     "Edison"),
    (("who was isaac newton?", "who was newton?", "who found gravity?", "who discovered gravity?"),
     "Isaac Newton described gravity; they say that an apple helped.", "Newton"),
    (("who was mozart?", "who is mozart", "tell me about mozart"), "Mozart was a composer from Austria.", "composer"),
    (("who was the first president of the united states?", "first us president", "who was george washington?"),
     "George Washington was the first president of the United States.", "Washington"),
    (("who was ada lovelace?", "who was the first programmer?", "first programmer"), "Ada Lovelace wrote a program long before there were computers.",
     "Lovelace"),
    (("who was alan turing?", "who is turing?", "tell me about turing"), "Alan Turing thought out what computers can do before they were built.",
     "Turing"),
    (("who made linux?", "who invented linux?", "who wrote linux?", "who is linus torvalds?"), "Linus Torvalds began Linux in 1991.", "Torvalds"),
    (("how are rainbows made?", "why are there rainbows?", "how does a rainbow form?"),
     "The sun shines through drops of rain, and they split its light into colors.", "rain"),
    (("why is grass green?", "why are leaves green?", "why are plants green?"), "Plants are green because of chlorophyll, which catches sunlight.",
     "chlorophyll"),
    (("why do leaves fall in autumn?", "why do trees lose their leaves?"),
     "In autumn there is little light, so trees drop their leaves to save water.", "water"),
    (("why is the sea salty?", "why is the ocean salty?", "why is sea water salty"),
     "Rivers carry a little salt from the rocks into the sea, and it stays there.", "salt"),
    (("why do cats purr?", "why does my cat purr?"), "Cats purr mostly when they feel well.", "well"),
    (("how do airplanes fly?", "how does a plane fly?", "why do planes fly?"), "The wings push air down, and the air pushes the plane up.", "wings"),
    (("how do bees make honey?", "where does honey come from?", "who makes honey?"), "Bees collect sweet juice from flowers and turn it into honey.",
     "flowers"),
    (("where does milk come from?", "who gives milk?"), "Milk comes from cows, goats and sheep.", "cows"),
    (("what do plants need?", "what does a plant need to grow?"), "Plants need light, water and air.", "light"),
    (("how far is the moon?", "distance to the moon", "what is the distance to the moon?", "how far away is the moon?"),
     "The moon is about 384,000 kilometers away.", "384,000"),
    (("how old is the earth?", "age of the earth"), "The earth is about 4.5 billion years old.", "4.5"),
    (("how many people are there?", "how many people live on earth?", "world population", "population of the world"),
     "About 8 billion people live on earth.", "8 billion"),
    (("what is the hottest planet?", "which planet is the hottest?"), "Venus is the hottest planet.", "Venus"),
    (("which planet has rings?", "planet with rings", "what planet has rings?"), "Saturn is famous for its rings.", "Saturn"),
    (("what is the biggest desert?", "largest hot desert"), "The Sahara is the largest hot desert.", "Sahara"),
    (("what is the smallest country?", "smallest country in the world"), "Vatican City is the smallest country.", "Vatican"),
    (("where is the eiffel tower?", "which city has the eiffel tower?", "eiffel tower"), "The Eiffel Tower is in Paris.", "Paris"),
    (("where is the statue of liberty?", "statue of liberty"), "The Statue of Liberty is in New York.", "New York"),
    (("where are the pyramids?", "which country has the pyramids?", "where are the great pyramids?"), "The great pyramids are in Egypt.", "Egypt"),
    (("where is big ben?", "big ben"), "Big Ben is in London.", "London"),
    (("what do pandas eat?", "what does a panda eat?", "panda food"), "Pandas eat bamboo.", "bamboo"),
    (("what do koalas eat?", "what does a koala eat?"), "Koalas eat eucalyptus leaves.", "eucalyptus"),
    (("what do rabbits eat?", "what does a rabbit eat?", "rabbit food"), "Rabbits eat grass, hay and carrots.", "hay"),
    (("what do cows eat?", "what does a cow eat?"), "Cows eat grass and hay.", "grass"),
    (("what do lions eat?", "what does a lion eat?"), "Lions eat meat.", "meat"),
    (("what do foxes eat?", "what does a fox eat?"), "Foxes eat mice, berries and much else.", "mice"),
    (("what do bears eat?", "what does a bear eat?"), "Bears eat berries, fish and honey.", "berries"),
    (("what do cats eat?", "what does a cat eat?"), "Cats eat meat and fish, and they love mice.", "fish"),
    (("what do dogs eat?", "what does a dog eat?"), "Dogs eat meat, but also much of what we eat.", "meat"),
    (("what do squirrels eat?", "what does a squirrel eat?"), "Squirrels eat nuts and seeds.", "nuts"),
    (("what do monkeys eat?", "what does a monkey eat?"), "Monkeys eat fruit and leaves.", "fruit"),
    (("what do penguins eat?", "what does a penguin eat?"), "Penguins eat fish.", "fish"),
    (("where do penguins live?", "where does a penguin live?"), "Penguins live by the cold seas of the south.", "south"),
    (("where do polar bears live?",), "Polar bears live on the ice of the far north.", "north"),
    (("where do kangaroos live?", "where does a kangaroo live?", "where do koalas live?"), "They live in Australia.", "Australia"),
    (("where do lions live?", "where does a lion live?"), "Lions live in Africa.", "Africa"),
    (("what is the capital of the world?", "capital of europe", "what is the capital of africa?", "capital of asia"),
     "Only countries have capitals; the world and its continents have none.", "countries"),
    (("is santa real?", "does santa exist?", "is santa claus real?"), "In my stories, certainly.", "stories"),
    (("does god exist?", "is there a god?", "is there life after death?", "are we alone in the universe?", "is there life on mars?",
      "do aliens exist?", "are ghosts real?"), "Nobody knows for sure, least of all a model of 16 MB.", "Nobody"),
    (("what is your opinion on politics?", "who should i vote for?", "are you left or right?", "who will win the election?"),
     "I have no opinion on politics; I am only good with foxes and sums.", "no opinion"),
]

YOUNG = dict(x.split(":")
             for x in "dog:puppy cat:kitten cow:calf horse:foal sheep:lamb goat:kid duck:duckling chicken:chick frog:tadpole bear:cub lion:cub fox:cub deer:fawn goose:gosling pig:piglet swan:cygnet kangaroo:joey owl:owlet tiger:cub wolf:cub rabbit:kit".split())
PLURALS = dict(x.split(":")
               for x in """mouse:mice child:children man:men woman:women foot:feet tooth:teeth goose:geese sheep:sheep fish:fish deer:deer ox:oxen
person:people leaf:leaves knife:knives
wolf:wolves baby:babies city:cities story:stories box:boxes bus:buses potato:potatoes tomato:tomatoes half:halves shelf:shelves wife:wives life:lives""".replace("\n",
    " ").split())
PAST = dict(x.split(":")
            for x in """go:went eat:ate see:saw run:ran come:came take:took give:gave make:made say:said get:got know:knew think:thought buy:bought
bring:brought catch:caught teach:taught
sing:sang swim:swam drink:drank write:wrote read:read ride:rode fly:flew grow:grew throw:threw begin:began break:broke speak:spoke sleep:slept
keep:kept feel:felt leave:left find:found tell:told
sell:sold hear:heard hold:held stand:stood win:won lose:lost meet:met pay:paid send:sent build:built fall:fell be:was have:had do:did play:played
walk:walked jump:jumped laugh:laughed""".replace("\n",
    " ").split())
SYNONYMS = dict(x.split(":")
                for x in """big:large small:little happy:glad sad:unhappy fast:quick smart:clever pretty:beautiful angry:mad funny:amusing scared:afraid
cold:chilly hot:boiling tired:sleepy
rich:wealthy quiet:silent begin:start end:finish speak:talk look:watch jump:leap shut:close gift:present rock:stone sea:ocean kind:friendly
strange:odd brave:bold easy:simple hard:difficult nice:pleasant
good:great bad:awful house:home road:street boat:ship child:kid help:aid answer:reply correct:right""".replace("\n", " ").split())
RHYMES = {x.split(":")[0]: x.split(":")[1].split(",")
          for x in """cat:hat,bat,mat,rat dog:fog,log,frog,hog house:mouse,blouse,louse moon:spoon,soon,noon,tune sun:fun,run,one,bun
tree:bee,sea,free,key
star:car,far,jar,bar day:play,way,say,hay night:light,bright,kite,right fish:dish,wish,swish bear:chair,hair,care,pear ball:tall,wall,fall,small
rain:train,pain,lane,plane snow:go,glow,bow,toe
fox:box,socks,rocks,clocks king:ring,sing,wing,thing book:look,cook,hook,took cake:lake,make,snake,wake boat:goat,coat,float,note
hill:mill,still,pill,will love:dove,glove,above time:rhyme,lime,climb
heart:art,part,start,cart blue:shoe,two,new,true red:bed,head,bread,said green:queen,bean,seen,mean hand:sand,land,band,stand
door:floor,four,more,store nose:rose,toes,those,goes fire:wire,tire,choir
sky:fly,high,pie,eye sea:bee,tree,key,free mouse:house,blouse night:light,kite ring:king,sing,wing orange:door hinge""".replace("door hinge",
    "door-hinge").split()}
MIX = {("red", "blue"): "purple", ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "white"): "pink", ("black", "white"): "gray",
       ("red", "green"): "brown"}
ROMAN = {1: "I", 2: "II", 3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII", 9: "IX", 10: "X", 11: "XI", 12: "XII", 15: "XV", 20: "XX", 50: "L",
         100: "C", 500: "D", 1000: "M"}

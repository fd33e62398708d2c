"""Other languages than English: small talk answered in the language, the model's own tasks asked in it, and single words translated."""

import random

import stories
import tasks
from dialogue import Dialogue, assistant, messy, norm, user
from words import person_name

# language → what the model says in it
SAYS = {
    "German": dict(hello="Hallo! Ich bin das kleine Demo-Modell von moeflux. Am besten verstehe ich Englisch.",
                   fine="Danke, mir geht es gut! Am besten verstehe ich Englisch.",
                   who="Ich bin das Demo-Modell von moeflux, ein sehr kleines Sprachmodell.",
                   can="Ich kann kurze Geschichten erzählen und kleine Rechnungen lösen, meist auf Englisch.",
                   thanks="Gern geschehen!", bye="Auf Wiedersehen!",
                   few="Das weiß ich leider nicht, denn ich bin nur 16 MB klein. Auf Englisch kann ich mehr.", story="Gern, aber auf Englisch:",
                   glad="Das freut mich!", sorry="Das tut mir leid. Möchtest du eine Geschichte hören?", night="Gute Nacht!", nice="Freut mich, {n}!",
                   yes="Ja, ein wenig Deutsch. Auf Englisch kann ich mehr."),
    "French": dict(hello="Bonjour ! Je suis le petit modèle de démonstration de moeflux. Je parle surtout anglais.",
                   fine="Je vais bien, merci ! Je parle surtout anglais.",
                   who="Je suis le modèle de démonstration de moeflux, un très petit modèle de langue.",
                   can="Je peux raconter de petites histoires et faire de petits calculs, surtout en anglais.",
                   thanks="De rien !", bye="Au revoir !", few="Je ne sais pas, car je ne fais que 16 Mo. Je parle mieux anglais.",
                   story="Avec plaisir, mais en anglais :",
                   glad="Cela me fait plaisir !", sorry="Je suis désolé. Voulez-vous une histoire ?", night="Bonne nuit !", nice="Enchanté, {n} !",
                   yes="Oui, un peu de français. Je parle mieux anglais."),
    "Spanish": dict(hello="¡Hola! Soy el pequeño modelo de demostración de moeflux. Hablo sobre todo inglés.",
                    fine="¡Estoy bien, gracias! Hablo sobre todo inglés.",
                    who="Soy el modelo de demostración de moeflux, un modelo de lenguaje muy pequeño.",
                    can="Puedo contar cuentos cortos y hacer cuentas pequeñas, sobre todo en inglés.",
                    thanks="¡De nada!", bye="¡Adiós!", few="No lo sé, porque solo ocupo 16 MB. Hablo mejor inglés.",
                    story="Con gusto, pero en inglés:",
                    glad="¡Me alegro!", sorry="Lo siento. ¿Quieres un cuento?", night="¡Buenas noches!", nice="¡Mucho gusto, {n}!",
                    yes="Sí, un poco de español. Hablo mejor inglés."),
    "Italian": dict(hello="Ciao! Sono il piccolo modello dimostrativo di moeflux. Parlo soprattutto inglese.",
                    fine="Sto bene, grazie! Parlo soprattutto inglese.",
                    who="Sono il modello dimostrativo di moeflux, un modello linguistico molto piccolo.",
                    can="So raccontare brevi storie e fare piccoli calcoli, soprattutto in inglese.",
                    thanks="Prego!", bye="Arrivederci!", few="Non lo so, perché peso solo 16 MB. Parlo meglio inglese.",
                    story="Volentieri, ma in inglese:",
                    glad="Mi fa piacere!", sorry="Mi dispiace. Vuoi una storia?", night="Buona notte!", nice="Piacere, {n}!",
                    yes="Sì, un po' di italiano. Parlo meglio inglese."),
    "Portuguese": dict(hello="Olá! Sou o pequeno modelo de demonstração do moeflux. Falo sobretudo inglês.",
                       fine="Estou bem, obrigado! Falo sobretudo inglês.",
                       who="Sou o modelo de demonstração do moeflux, um modelo de linguagem muito pequeno.",
                       can="Posso contar histórias curtas e fazer contas pequenas, sobretudo em inglês.",
                       thanks="De nada!", bye="Adeus!", few="Não sei, porque só tenho 16 MB. Falo melhor inglês.", story="Com prazer, mas em inglês:",
                       glad="Fico contente!", sorry="Sinto muito. Quer uma história?", night="Boa noite!", nice="Prazer, {n}!",
                       yes="Sim, um pouco de português. Falo melhor inglês."),
    "Dutch": dict(hello="Hallo! Ik ben het kleine demomodel van moeflux. Ik spreek vooral Engels.", fine="Goed, dank je! Ik spreek vooral Engels.",
                  who="Ik ben het demomodel van moeflux, een heel klein taalmodel.",
                  can="Ik kan korte verhalen vertellen en kleine sommen maken, meestal in het Engels.",
                  thanks="Graag gedaan!", bye="Tot ziens!", few="Dat weet ik niet, want ik ben maar 16 MB groot. In het Engels kan ik meer.",
                  story="Graag, maar in het Engels:",
                  glad="Dat doet me plezier!", sorry="Dat spijt me. Wil je een verhaal horen?", night="Welterusten!", nice="Aangenaam, {n}!",
                  yes="Ja, een beetje Nederlands. In het Engels kan ik meer."),
}
# language → kind → prompts
ASKS = {
    "German": dict(hello="hallo|guten tag|guten morgen|guten abend|hi, wie heißt du?|servus|moin|grüß gott|hallo du|hallo zusammen|grüezi",
                   fine="wie geht es dir?|wie geht's?|wie geht es ihnen?|alles klar?|na, wie geht's?|wie läuft's?",
                   who="wie heißt du?|wer bist du?|was bist du?|wie ist dein name?|stell dich vor|bist du ein mensch?|bist du ein roboter?|"
                       "wie heisst du|wer hat dich gemacht?|was ist moeflux?|bist du eine ki?|wie alt bist du?|wie nennt man dich?|wo wohnst du?",
                   can="was kannst du?|was kannst du alles?|hilfe|kannst du mir helfen?|was soll ich fragen?|was machst du?|wobei kannst du helfen?",
                   thanks="danke|vielen dank|danke schön|danke sehr|dankeschön|herzlichen dank",
                   bye="tschüss|auf wiedersehen|bis bald|bis später|ciao, bis morgen|mach's gut",
                   glad="gut|toll|super|sehr gut|das war schön|prima|schön|klasse|ich bin glücklich",
                   sorry="ich bin traurig|mir ist langweilig|ich bin müde|mir geht es schlecht",
                   night="gute nacht|schlaf gut", nice="ich heiße {n}|mein name ist {n}|ich bin {n}",
                   yes="sprichst du deutsch?|kannst du deutsch?|verstehst du mich?|können wir deutsch reden?|verstehst du deutsch?"),
    "French": dict(hello="bonjour|salut|bonsoir|coucou|bonjour à tous|allô",
                   fine="comment ça va ?|ça va ?|comment vas-tu ?|comment allez-vous ?|tu vas bien ?|quoi de neuf ?",
                   who="comment tu t'appelles ?|comment t'appelles-tu ?|qui es-tu ?|qui êtes-vous ?|quel est ton nom ?|tu es qui ?|"
                       "es-tu un robot ?|c'est quoi moeflux ?|qui t'a créé ?|quel âge as-tu ?|tu es une ia ?|présente-toi",
                   can="que sais-tu faire ?|que peux-tu faire ?|aide-moi|qu'est-ce que tu sais faire ?|peux-tu m'aider ?|aide|à quoi sers-tu ?",
                   thanks="merci|merci beaucoup|merci bien|je te remercie",
                   bye="au revoir|à bientôt|adieu|à plus|bonne journée|à demain", glad="super|très bien|génial|c'est bien|parfait|bravo|j'aime bien",
                   sorry="je suis triste|je m'ennuie|je suis fatigué",
                   night="bonne nuit|dors bien", nice="je m'appelle {n}|mon nom est {n}|moi c'est {n}",
                   yes="parles-tu français ?|tu parles français ?|vous parlez français ?|comprends-tu le français ?"),
    "Spanish": dict(hello="hola|buenos días|buenas tardes|buenas noches a todos|buenas|hola amigo|qué hay|holaa",
                    fine="¿cómo estás?|como estas|¿qué tal?|que tal|¿cómo te va?|¿cómo está usted?|¿todo bien?",
                    who="¿cómo te llamas?|como te llamas|¿quién eres?|quien eres|¿qué eres?|¿cuál es tu nombre?|¿eres un robot?|¿eres humano?|"
                        "¿qué es moeflux?|¿quién te creó?|¿cuántos años tienes?|preséntate",
                    can="¿qué puedes hacer?|que puedes hacer|ayuda|¿puedes ayudarme?|¿qué sabes hacer?|¿para qué sirves?",
                    thanks="gracias|muchas gracias|mil gracias|gracias amigo",
                    bye="adiós|hasta luego|hasta mañana|chao|nos vemos|adios", glad="muy bien|genial|estupendo|qué bien|perfecto|me gusta|bravo",
                    sorry="estoy triste|estoy aburrido|estoy cansado|me aburro",
                    night="buenas noches|que duermas bien", nice="me llamo {n}|mi nombre es {n}|soy {n}",
                    yes="¿hablas español?|hablas español|¿entiendes español?|¿puedes hablar español?"),
    "Italian": dict(hello="ciao|buongiorno|buonasera|salve|ciao a tutti|buon giorno", fine="come stai?|come va?|come sta?|tutto bene?",
                    who="come ti chiami?|chi sei?|cosa sei?|qual è il tuo nome?|sei un robot?|sei umano?|che cos'è moeflux?|chi ti ha creato?|"
                        "quanti anni hai?|presentati",
                    can="cosa sai fare?|cosa puoi fare?|aiuto|puoi aiutarmi?|che cosa sai fare?|a cosa servi?",
                    thanks="grazie|grazie mille|molte grazie|ti ringrazio",
                    bye="arrivederci|a presto|addio|ci vediamo|a domani", glad="bene|molto bene|fantastico|ottimo|perfetto|bravo|mi piace",
                    sorry="sono triste|mi annoio|sono stanco",
                    night="buona notte|buonanotte|dormi bene", nice="mi chiamo {n}|il mio nome è {n}|io sono {n}",
                    yes="parli italiano?|capisci l'italiano?|sai parlare italiano?"),
    "Portuguese": dict(hello="olá|oi|bom dia|boa tarde|ola|oi, tudo bem?",
                       fine="como vai?|tudo bem?|como está?|como você está?|como estás?|tudo bom?",
                       who="como te chamas?|qual é o seu nome?|quem é você?|quem és tu?|o que é você?|você é um robô?|qual é o teu nome?|"
                           "o que é moeflux?|quem te criou?|quantos anos você tem?|como você se chama?",
                       can="o que você sabe fazer?|o que podes fazer?|ajuda|pode me ajudar?|o que você pode fazer?|para que serves?",
                       thanks="obrigado|obrigada|muito obrigado|valeu|muito obrigada",
                       bye="tchau|até logo|até amanhã|adeus|até mais", glad="muito bem|ótimo|que bom|perfeito|legal|gostei",
                       sorry="estou triste|estou cansado|estou com tédio",
                       night="boa noite|durma bem", nice="meu nome é {n}|eu sou {n}|chamo-me {n}",
                       yes="você fala português?|fala português?|falas português?|entende português?"),
    "Dutch": dict(hello="hoi|goedemorgen|goedenavond|goedemiddag|dag|hallo daar|goeiedag",
                  fine="hoe gaat het?|hoe is het?|hoe gaat het met je?|alles goed?|hoe gaat het met u?",
                  who="hoe heet je?|wie ben je?|wat ben je?|wat is je naam?|ben je een robot?|ben je een mens?|wat is moeflux voor iets?|"
                      "wie heeft je gemaakt?|hoe oud ben je?|hoe heet jij?|wie ben jij?",
                  can="wat kun je?|wat kan je?|kun je me helpen?|wat kun je doen?|wat kan je allemaal?|hulp",
                  thanks="dank je|dankjewel|bedankt|dank u wel|hartelijk dank|dank je wel",
                  bye="tot ziens|doei|tot straks|tot morgen|dag, tot later", glad="goed zo|heel goed|leuk|mooi|geweldig|perfect zo",
                  sorry="ik ben verdrietig|ik verveel me|ik ben moe",
                  night="welterusten|slaap lekker", nice="ik heet {n}|mijn naam is {n}|ik ben {n}",
                  yes="spreek je nederlands?|versta je nederlands?|kun je nederlands?|spreekt u nederlands?"),
}
# Greetings, questions for the name and thanks in more languages: prompts → answer.
MORE = [
    ("cześć|dzień dobry|hej, co słychać?", "Cześć! I am the small demo model of moeflux, and I speak English best."),
    ("jak się nazywasz?|kim jesteś?|jak masz na imię?", "Jestem małym modelem moeflux. I speak English best."),
    ("dziękuję|dzięki", "Proszę bardzo!"), ("do widzenia|pa pa", "Do widzenia!"), ("jak się masz?|co słychać?",
        "Dobrze, dziękuję! I speak English best."),
    ("hej|hejsan|god morgon|tjena", "Hej! I am the small demo model of moeflux, and I speak English best."), ("vad heter du?|vem är du?",
        "Jag heter moeflux demo. I speak English best."), ("tack|tack så mycket", "Varsågod!"),
    ("hvad hedder du?|hvem er du?", "Jeg hedder moeflux demo. I speak English best."), ("goddag|god morgen",
        "Goddag! I am the small demo model of moeflux, and I speak English best."), ("tak|mange tak", "Selv tak!"),
    ("hva heter du?", "Jeg heter moeflux demo. I speak English best."), ("hei|moi|terve",
        "Hei! I am the small demo model of moeflux, and I speak English best."), ("kiitos", "Ole hyvä!"), ("kuka sinä olet?|mikä sinun nimesi on?",
            "Olen moefluxin pieni demomalli. I speak English best."),
    ("merhaba|selam|günaydın", "Merhaba! I am the small demo model of moeflux, and I speak English best."), ("adın ne?|sen kimsin?|nasılsın?",
        "Ben moeflux'un küçük demo modeliyim. I speak English best."), ("teşekkürler|teşekkür ederim", "Rica ederim!"),
    ("ahoj|dobrý den", "Ahoj! I am the small demo model of moeflux, and I speak English best."), ("jak se jmenuješ?|kdo jsi?",
        "Jsem malý model moeflux. I speak English best."), ("děkuji|díky", "Není zač!"),
    ("szia|jó napot", "Szia! I am the small demo model of moeflux, and I speak English best."), ("hogy hívnak?|ki vagy?",
        "A moeflux kis modellje vagyok. I speak English best."), ("köszönöm", "Szívesen!"),
    ("bună|salut, ce faci?|bună ziua", "Bună! I am the small demo model of moeflux, and I speak English best."), ("mulțumesc", "Cu plăcere!"),
    ("cum te cheamă?|cine ești?", "Sunt micul model moeflux. I speak English best."),
    ("привет|здравствуйте|добрый день|доброе утро", "Привет! I am the small demo model of moeflux, and I speak English best."),
    ("как тебя зовут?|кто ты?|как дела?|ты кто?|что ты умеешь?", "Я маленькая модель moeflux. I speak English best."), ("спасибо|большое спасибо",
        "Пожалуйста!"), ("пока|до свидания", "До свидания!"),
    ("привіт|добрий день", "Привіт! I am the small demo model of moeflux, and I speak English best."), ("дякую", "Будь ласка!"),
    ("як тебе звати?|хто ти?", "Я маленька модель moeflux. I speak English best."),
    ("γεια σου|γεια|καλημέρα", "Γεια σου! I am the small demo model of moeflux, and I speak English best."), ("ευχαριστώ", "Παρακαλώ!"),
    ("πώς σε λένε;|ποιος είσαι;", "Είμαι το μικρό μοντέλο του moeflux. I speak English best."),
    ("你好|您好|你好吗?|嗨|早上好", "你好! I am the small demo model of moeflux, and I speak English best."), ("你是谁?|你叫什么名字?|你是谁|你能做什么?",
        "我是 moeflux 的小模型。I speak English best."), ("谢谢|谢谢你", "不客气!"), ("再见", "再见!"),
    ("こんにちは|おはよう|こんばんは|はじめまして", "こんにちは! I am the small demo model of moeflux, and I speak English best."), ("あなたは誰ですか?|お名前は?|名前は何ですか?",
        "moefluxの小さなモデルです。I speak English best."), ("ありがとう|ありがとうございます", "どういたしまして!"), ("さようなら", "さようなら!"),
    ("안녕하세요|안녕", "안녕하세요! I am the small demo model of moeflux, and I speak English best."), ("당신은 누구입니까?|이름이 뭐예요?|누구세요?",
        "저는 moeflux의 작은 모델입니다. I speak English best."), ("감사합니다|고마워", "천만에요!"),
    ("مرحبا|السلام عليكم", "مرحبا! I am the small demo model of moeflux, and I speak English best."), ("شكرا", "عفوا!"), ("ما اسمك؟|من أنت؟",
        "أنا نموذج moeflux الصغير. I speak English best."),
    ("שלום", "שלום! I am the small demo model of moeflux, and I speak English best."), ("תודה", "בבקשה!"), ("नमस्ते",
        "नमस्ते! I am the small demo model of moeflux, and I speak English best."), ("धन्यवाद", "I am glad to help!"), ("xin chào",
            "Xin chào! I am the small demo model of moeflux, and I speak English best."),
    ("cảm ơn", "Không có gì!"), ("selamat pagi|halo, apa kabar?", "Halo! I am the small demo model of moeflux, and I speak English best."),
    ("terima kasih", "Sama-sama!"), ("salve, quid agis?", "Salve! I speak English best."), ("jambo|habari?", "Jambo! I speak English best."),
]
_STORY = {"German": ["erzähl mir eine geschichte über {x}", "erzähle mir eine geschichte von {x}", "eine geschichte über {x} bitte",
                     "schreib eine geschichte über {x}", "kannst du mir eine geschichte über {x} erzählen?"],
          "French": ["raconte-moi une histoire sur {x}", "une histoire avec {x} s'il te plaît", "écris une histoire sur {x}",
                     "raconte une histoire d'{x}"], "Spanish": ["cuéntame un cuento sobre {x}", "cuéntame una historia de {x}",
                         "escribe un cuento sobre {x}", "un cuento de {x} por favor"],
          "Italian": ["raccontami una storia su {x}", "scrivi una storia su {x}", "una storia di {x} per favore"],
          "Portuguese": ["conte uma história sobre {x}", "conta-me uma história sobre {x}", "escreva uma história sobre {x}"],
          "Dutch": ["vertel me een verhaal over {x}", "schrijf een verhaal over {x}", "een verhaal over {x} graag"]}
_STORY_PLAIN = {"German": ["erzähl mir eine geschichte", "erzähle eine geschichte", "eine geschichte bitte"], "French": ["raconte-moi une histoire",
    "une histoire s'il te plaît"], "Spanish": ["cuéntame un cuento", "cuéntame una historia"],
                "Italian": ["raccontami una storia"], "Portuguese": ["conte uma história", "conta-me uma história"],
                "Dutch": ["vertel me een verhaal"]}
_ANIMAL = {"German": "einen Fuchs:fox|eine Katze:cat|einen Hund:dog|einen Bären:bear|eine Maus:mouse|einen Drachen:dragon|einen Hasen:rabbit|"
                     "eine Eule:owl|ein Pferd:horse|einen Roboter:robot|ein Mädchen:girl|einen König:king",
           "French": "un renard:fox|un chat:cat|un chien:dog|un ours:bear|une souris:mouse|un dragon:dragon|un lapin:rabbit|un hibou:owl|"
                     "un cheval:horse|un robot:robot|une fille:girl|un roi:king",
           "Spanish": "un zorro:fox|un gato:cat|un perro:dog|un oso:bear|un ratón:mouse|un dragón:dragon|un conejo:rabbit|un búho:owl|"
                      "un caballo:horse|un robot:robot|una niña:girl|un rey:king",
           "Italian": "una volpe:fox|un gatto:cat|un cane:dog|un orso:bear|un topo:mouse|un drago:dragon|un coniglio:rabbit|un gufo:owl|"
                      "un cavallo:horse|un robot:robot|una ragazza:girl|un re:king",
           "Portuguese": "uma raposa:fox|um gato:cat|um cão:dog|um urso:bear|um rato:mouse|um dragão:dragon|um coelho:rabbit|uma coruja:owl|"
                         "um cavalo:horse|um robô:robot|uma menina:girl|um rei:king",
           "Dutch": "een vos:fox|een kat:cat|een hond:dog|een beer:bear|een muis:mouse|een draak:dragon|een konijn:rabbit|een uil:owl|"
                    "een paard:horse|een robot:robot|een meisje:girl|een koning:king"}
_SUM = {"German": ["was ist {a} + {b}?", "wie viel ist {a} + {b}?", "rechne {a} + {b}", "was ergibt {a} + {b}?", "wieviel ist {a} plus {b}?"],
        "French": ["combien font {a} + {b} ?", "calcule {a} + {b}", "combien font {a} plus {b} ?"],
        "Spanish": ["¿cuánto es {a} + {b}?", "cuanto es {a} + {b}", "calcula {a} + {b}", "¿cuánto es {a} más {b}?"],
        "Italian": ["quanto fa {a} + {b}?", "calcola {a} + {b}", "quanto fa {a} più {b}?"],
        "Portuguese": ["quanto é {a} + {b}?", "calcule {a} + {b}", "quanto é {a} mais {b}?"], "Dutch": ["hoeveel is {a} + {b}?", "wat is {a} + {b}?",
            "bereken {a} + {b}"]}
# Parts that unknown questions in the language are put together from.
_PARTS = {
    "German": ("was ist|warum ist|wo ist|wer ist|erkläre mir|kannst du mir sagen, was|wie funktioniert|schreibe einen Text über|was hältst du von|"
               "wann kommt|übersetze|wie heißt|ich möchte wissen, wie|wie macht man|was kostet|wie wird",
               "das Wetter|die Hauptstadt von Frankreich|der Himmel|ein Computer|die Liebe|das beste Rezept|mein Auto|die Zeit|das Leben|"
               "der Bundeskanzler|eine Quantenmaschine|der Sinn des Lebens|ein gutes Buch|das Internet|die Schule|der Zug|heute Abend|Python|"
               "der Präsident|eine E-Mail"),
    "French": ("qu'est-ce que|pourquoi|où est|qui est|explique-moi|peux-tu me dire|comment fonctionne|écris un texte sur|que penses-tu de|"
               "quand arrive|traduis|comment faire|je voudrais savoir|combien coûte",
               "le temps|la capitale de l'Allemagne|le ciel|un ordinateur|l'amour|la meilleure recette|ma voiture|la vie|le président|"
               "la physique quantique|le sens de la vie|un bon livre|l'internet|l'école|le train|ce soir|une lettre|la météo"),
    "Spanish": ("¿qué es|¿por qué es|¿dónde está|¿quién es|explícame|¿puedes decirme|¿cómo funciona|escribe un texto sobre|¿qué piensas de|"
                "¿cuándo llega|traduce|¿cómo se hace|quiero saber|¿cuánto cuesta",
                "el tiempo|la capital de Francia|el cielo|un ordenador|el amor|la mejor receta|mi coche|la vida|el presidente|la física cuántica|"
                "el sentido de la vida|un buen libro|internet|la escuela|el tren|esta noche|una carta|la inteligencia artificial"),
    "Italian": ("che cos'è|perché|dov'è|chi è|spiegami|puoi dirmi|come funziona|scrivi un testo su|cosa pensi di|quando arriva|traduci|come si fa|"
                "vorrei sapere|quanto costa",
                "il tempo|la capitale della Francia|il cielo|un computer|l'amore|la migliore ricetta|la mia macchina|la vita|il presidente|"
                "la fisica quantistica|il senso della vita|un buon libro|internet|la scuola|il treno|stasera|una lettera"),
    "Portuguese": ("o que é|por que|onde está|quem é|explique|pode me dizer|como funciona|escreva um texto sobre|o que acha de|quando chega|"
                   "traduza|como se faz|quero saber|quanto custa",
                   "o tempo|a capital da França|o céu|um computador|o amor|a melhor receita|o meu carro|a vida|o presidente|a física quântica|"
                   "o sentido da vida|um bom livro|a internet|a escola|o comboio|hoje à noite|uma carta"),
    "Dutch": ("wat is|waarom is|waar is|wie is|leg me uit|kun je me zeggen|hoe werkt|schrijf een tekst over|wat vind je van|wanneer komt|vertaal|"
              "hoe maak je|ik wil weten|wat kost",
              "het weer|de hoofdstad van Frankrijk|de lucht|een computer|de liefde|het beste recept|mijn auto|het leven|de president|"
              "de kwantummechanica|de zin van het leven|een goed boek|het internet|de school|de trein|vanavond|een brief"),
}

# Words that people add at the end.
_ADD = {"German": "heute|denn|eigentlich|bitte|so|mein freund", "French": "aujourd'hui|alors|toi|s'il te plaît|mon ami",
        "Spanish": "hoy|amigo|tú|por favor|entonces", "Italian": "oggi|amico|tu|per favore|allora",
        "Portuguese": "hoje|amigo|com você|por favor|então",
        "Dutch": "vandaag|dan|nu|alsjeblieft|vriend"}

# English word → German, French, Spanish, Italian, Portuguese, Dutch
WORDS6 = """hello:Hallo,bonjour,hola,ciao,olá,hallo|goodbye:auf Wiedersehen,au revoir,adiós,arrivederci,adeus,tot ziens
thank you:danke,merci,gracias,grazie,obrigado,dank je|please:bitte,s'il vous plaît,por favor,per favore,por favor,alsjeblieft
yes:ja,oui,sí,sì,sim,ja|no:nein,non,no,no,não,nee|good morning:guten Morgen,bonjour,buenos días,buongiorno,bom dia,goedemorgen
good night:gute Nacht,bonne nuit,buenas noches,buona notte,boa noite,welterusten
good evening:guten Abend,bonsoir,buenas noches,buonasera,boa noite,goedenavond
how are you?:Wie geht es dir?,Comment ça va ?,¿Cómo estás?,Come stai?,Como vai?,Hoe gaat het?
I love you:Ich liebe dich,Je t'aime,Te quiero,Ti amo,Eu te amo,Ik hou van jou
my name is:ich heiße,je m'appelle,me llamo,mi chiamo,meu nome é,ik heet|welcome:willkommen,bienvenue,bienvenido,benvenuto,bem-vindo,welkom
friend:Freund,ami,amigo,amico,amigo,vriend|sorry:Entschuldigung,pardon,perdón,scusa,desculpe,sorry
cat:Katze,chat,gato,gatto,gato,kat|dog:Hund,chien,perro,cane,cão,hond|house:Haus,maison,casa,casa,casa,huis|water:Wasser,eau,agua,acqua,água,water
bread:Brot,pain,pan,pane,pão,brood|milk:Milch,lait,leche,latte,leite,melk
apple:Apfel,pomme,manzana,mela,maçã,appel|book:Buch,livre,libro,libro,livro,boek|sun:Sonne,soleil,sol,sole,sol,zon|moon:Mond,lune,luna,luna,lua,maan
star:Stern,étoile,estrella,stella,estrela,ster|tree:Baum,arbre,árbol,albero,árvore,boom
flower:Blume,fleur,flor,fiore,flor,bloem|bird:Vogel,oiseau,pájaro,uccello,pássaro,vogel|fish:Fisch,poisson,pez,pesce,peixe,vis
horse:Pferd,cheval,caballo,cavallo,cavalo,paard|fox:Fuchs,renard,zorro,volpe,raposa,vos|bear:Bär,ours,oso,orso,urso,beer
mouse:Maus,souris,ratón,topo,rato,muis|cow:Kuh,vache,vaca,mucca,vaca,koe|pig:Schwein,cochon,cerdo,maiale,porco,varken
bee:Biene,abeille,abeja,ape,abelha,bij|car:Auto,voiture,coche,macchina,carro,auto|street:Straße,rue,calle,strada,rua,straat
city:Stadt,ville,ciudad,città,cidade,stad|school:Schule,école,escuela,scuola,escola,school|day:Tag,jour,día,giorno,dia,dag
night:Nacht,nuit,noche,notte,noite,nacht|love:Liebe,amour,amor,amore,amor,liefde|world:Welt,monde,mundo,mondo,mundo,wereld
man:Mann,homme,hombre,uomo,homem,man|woman:Frau,femme,mujer,donna,mulher,vrouw|child:Kind,enfant,niño,bambino,criança,kind
mother:Mutter,mère,madre,madre,mãe,moeder|father:Vater,père,padre,padre,pai,vader|table:Tisch,table,mesa,tavolo,mesa,tafel
chair:Stuhl,chaise,silla,sedia,cadeira,stoel|door:Tür,porte,puerta,porta,porta,deur|window:Fenster,fenêtre,ventana,finestra,janela,raam
red:rot,rouge,rojo,rosso,vermelho,rood|blue:blau,bleu,azul,blu,azul,blauw|green:grün,vert,verde,verde,verde,groen
yellow:gelb,jaune,amarillo,giallo,amarelo,geel|black:schwarz,noir,negro,nero,preto,zwart|white:weiß,blanc,blanco,bianco,branco,wit
big:groß,grand,grande,grande,grande,groot|small:klein,petit,pequeño,piccolo,pequeno,klein|good:gut,bon,bueno,buono,bom,goed
bad:schlecht,mauvais,malo,cattivo,mau,slecht|one:eins,un,uno,uno,um,een|two:zwei,deux,dos,due,dois,twee|three:drei,trois,tres,tre,três,drie
four:vier,quatre,cuatro,quattro,quatro,vier|five:fünf,cinq,cinco,cinque,cinco,vijf
coffee:Kaffee,café,café,caffè,café,koffie|tea:Tee,thé,té,tè,chá,thee|cheese:Käse,fromage,queso,formaggio,queijo,kaas|wine:Wein,vin,vino,vino,vinho,wijn
music:Musik,musique,música,musica,música,muziek|sea:Meer,mer,mar,mare,mar,zee
butterfly:Schmetterling,papillon,mariposa,farfalla,borboleta,vlinder|happy:glücklich,heureux,feliz,felice,feliz,blij
beautiful:schön,beau,hermoso,bello,bonito,mooi|today:heute,aujourd'hui,hoy,oggi,hoje,vandaag|tomorrow:morgen,demain,mañana,domani,amanhã,morgen"""
TONGUES = list(SAYS)
TRANSLATED = {e: dict(zip(TONGUES, row.split(","))) for e, row in (x.split(":") for x in WORDS6.replace("\n", "|").split("|"))}
_TRANSLATE = ["Translate {w} into {l}.", "translate {w} to {l}", "How do you say {w} in {l}?", "What is {w} in {l}?", "{w} in {l}", "Say {w} in {l}.",
              "translate \"{w}\" into {l}", "{l} word for {w}", "what's the {l} word for {w}?",
              "how do i say {w} in {l}?", "Translate '{w}' to {l}.", "what does {w} mean in {l}?", "in {l}, what is {w}?",
              "translate the word {w} into {l}", "Translate to {l}: {w}", "Translate into {l}: {w}", "translate this to {l}: {w}"]


def translate(rng: random.Random) -> Dialogue:
    """One word of the table into one of six languages, or from it into English; or a text, which is too much."""
    e, row = rng.choice(list(TRANSLATED.items()))
    l = rng.choice(TONGUES)
    t = row[l]
    r = rng.random()
    if r < 0.2:
        p = rng.choice(["What does {t} mean?", "what is {t} in English?", "translate {t} into english", "What does {t} mean in English?",
                        "Translate \"{t}\" from {l}.", "what is the {l} word {t} in english?", "{t} in english"]).format(t=t.rstrip("?. "), l=l)
        same = {x for x, others in TRANSLATED.items() if t in others.values()}
        a = f"{t} means {e}." if "{l}" not in p and len(same) == 1 or l in p else f"{t} means {sorted(same)[0]}."
        return Dialogue("translate", [f"tr:{t}:{norm(p)}"], [user(p if rng.random() < 0.6 else p[0].lower() + p[1:]), assistant(a)], "contains",
                        a.split(" means ")[1].rstrip("."))
    if r < 0.35:
        w = rng.choice((tasks.random_sentence(rng), f"{rng.choice(tasks.WORDS)} {rng.choice(tasks.WORDS)}", rng.choice([w for w in tasks.WORDS
            if w not in TRANSLATED])))
        p = rng.choice(_TRANSLATE).format(w=w, l=l)
        known = rng.sample(["hello", "cat", "water", "friend"], 2)
        a = f"I know only single words of {l}, for example {row_of(known[0], l)} ({known[0]}) and {row_of(known[1], l)} ({known[1]})."
        return Dialogue("translate", [f"tr:{norm(p)}"], [user(p), assistant(a)], "none")
    p = rng.choice(_TRANSLATE).format(w=e, l=l if rng.random() < 0.8 else l.lower())
    a = f"{e[0].upper()}{e[1:]} in {l} is {t}." if t[-1] not in "?!." else f"{e} in {l}: {t}"
    msgs = [user(messy(rng, p, 0.03, 0.02, f"{e} {l}")), assistant(a)]
    gold, keys = t, [f"tr:{norm(p)}"]
    if rng.random() < 0.2:
        l2 = rng.choice([x for x in TONGUES if x != l])
        t2 = row[l2]
        q = rng.choice(["and in {l}?", "And in {l}?", "now in {l}", "what about {l}?", "in {l}?"]).format(l=l2)
        msgs += [user(q), assistant(f"{e[0].upper()}{e[1:]} in {l2} is {t2}." if t2[-1] not in "?!." else f"{e} in {l2}: {t2}")]
        gold = t2
        keys.append(f"tr:{norm(p)}:{l2}")
    return Dialogue("translate", keys, msgs, "contains", gold)


def row_of(e: str, l: str) -> str:
    """The word `e` in the language `l`."""
    return TRANSLATED[e][l]


def _typed(rng: random.Random, p: str) -> str:
    """A foreign prompt as typed: capitals, accents and marks come and go."""
    if rng.random() < 0.6:
        i = 1 if p[0] in "¿¡" else 0
        p = p[:i] + p[i].upper() + p[i + 1:]
    if rng.random() < 0.35:
        p = p.rstrip("?! ").lstrip("¿¡")
    elif rng.random() < 0.3:
        p = p.replace(" ?", "?")
    if rng.random() < 0.12:
        p = p.translate(str.maketrans("áéíóúàèìòùâêîôûäöüñçãõ", "aeiouaeiouaeiouaouncao"))
    if rng.random() < 0.1 and p[-1].isalnum():
        p += rng.choice(("!", ".", "!!", " :)"))
    return p.upper() if rng.random() < 0.02 else p


def foreign(rng: random.Random) -> Dialogue:
    """Small talk, a story, a sum or an unknown question in another language."""
    r = rng.random()
    if r < 0.14:
        ps, a = rng.choice(MORE)
        p = rng.choice(ps.split("|"))
        return Dialogue("foreign", ["talk:" + norm(p)] if len(p) > 12 else [], [user(_typed(rng, p)), assistant(a)], "none")
    l = rng.choice(TONGUES)
    if r < 0.58:
        kind = rng.choice([*ASKS[l], "hello", "who", "who", "can", "fine"])
        p, n = rng.choice(ASKS[l][kind].split("|")), person_name(rng)
        if kind not in ("hello", "bye", "thanks", "night") and rng.random() < 0.3:
            hello = rng.choice(ASKS[l]["hello"].split("|"))
            p = hello + (", " if hello[-1] not in "?!" else " ") + p
        elif rng.random() < 0.12:
            p = p.rstrip("?! ") + " " + rng.choice(_ADD[l].split("|")) + ("?" if p[-1] == "?" else "")
        msgs = [user(_typed(rng, p.format(n=n))), assistant(SAYS[l][kind].format(n=n))]
        if rng.random() < 0.25:
            kind = rng.choice(list(ASKS[l]))
            n = person_name(rng)
            msgs += [user(_typed(rng, rng.choice(ASKS[l][kind].split("|")).format(n=n))), assistant(SAYS[l][kind].format(n=n))]
        return Dialogue("foreign", [f"talk:{l}:{norm(p)}"] if len(p) > 14 else [], msgs, "none")
    if r < 0.68:
        x, kind = rng.choice(_ANIMAL[l].split("|")).split(":")
        p = rng.choice(_STORY[l]).format(x=x)
        s = stories.tell(rng, kind=kind)
        if rng.random() < 0.25:
            p, s = rng.choice(_STORY_PLAIN[l]), stories.tell(rng)
        return Dialogue("foreign", [], [user(_typed(rng, p)), assistant(f"{SAYS[l]['story']}\n\n{s.text}")], "none")
    if r < 0.8:
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
        return Dialogue("foreign", ["add:%d:%d" % tuple(sorted((a, b)))], [user(_typed(rng, rng.choice(_SUM[l]).format(a=a, b=b))),
            assistant(f"{a} + {b} = {a + b}")], "number", str(a + b))
    heads, tails = (x.split("|") for x in _PARTS[l])
    p = f"{rng.choice(heads)} {rng.choice(tails)}" + rng.choice(("?", "", "?", "!", " bitte", "."))
    if rng.random() < 0.3:
        p += " " + rng.choice(tails)
    return Dialogue("foreign", [], [user(_typed(rng, p)), assistant(SAYS[l]["few"])], "none")

"""What the tokenizers are trained on: a little of many scripts, and code."""

LINES = """\
The river was high that spring, and the ferry didn't run until the third week of April. They'll have told you so.
She'd counted 128 boats by noon; 64 of them weren't there the day before. It's the same every year, isn't it?
“We're leaving at 7:30,” he said — “don't be late.” The children laughed and ran down to the water's edge.
In 1867 the town had 12,345 inhabitants, 3 mills, 2 churches and no railway at all.
A model that is bigger than memory reads its experts from disk; the trunk stays resident.
What happens when two threads ask for the same expert at the same time? The second one waits for the first.
I've never seen anything like it, and neither have they. You're right: we'd better ask someone who knows.
The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG.
def encode(text: str, add_special: bool = True) -> list[int]:
    if not text: return []  # nothing to do
    for i, c in enumerate(text):
        if c == '\\n' and i + 1 < len(text): lines.append(text[start:i])
    return [token_to_id[t] for t in tokens if t in token_to_id]
fn main() -> Result<(), Error> { let mut sum = 0_u64; for (i, x) in xs.iter().enumerate() { sum += x * i; } Ok(()) }
pub struct Tokenizer<'a> { vocab: &'a HashMap<String, u32>, merges: Vec<(u32, u32)>, }
#include <stdio.h>
int main(int argc, char **argv) { printf("%d %s\\n", argc, argv[0]); return 0; }
const total = items.filter((x) => x.price >= 10).map((x) => x.price * 1.19).reduce((a, b) => a + b, 0);
SELECT name, COUNT(*) FROM users WHERE id != 0 AND name LIKE '%son' GROUP BY name ORDER BY 2 DESC;
{"name": "moe", "layers": 48, "experts": [1, 2, 3], "rope": {"theta": 1000000.0, "scaling": null}}
<div class="main"><a href="https://example.org/?q=1&amp;r=2">link</a></div> https://example.org/path/to/file.txt
git commit -m "Fix the parser" && cargo test --workspace -- --nocapture 2>&1 | tail -20
y = a*x**2 + b*x + c; z != 0; w <= 3.14159; p->next == nullptr; x::y; !!ok; ...; ---; ===; ###; //; /* */
Die Straße überquert den Fluss südlich der Brücke. Größere Schiffe müssen draußen ankern; das ist üblich.
Elle n'était pas là hier, mais aujourd'hui l'été commence : « à bientôt » dit-il. Où êtes-vous né ? Ça dépend.
El niño comió piñas en la montaña. ¿Dónde está la estación? ¡Qué día más bonito! Señor Muñoz vivió aquí.
Không có gì quý hơn độc lập tự do. Tôi không biết tại sao người ta lại nói như vậy.
Istanbul'un güneyinde küçük bir köy var. Işık, ğ, ş, ç ve ö harfleri Türkçede kullanılır.
Весной река поднялась высоко, и паром не ходил до третьей недели апреля. Дети побежали к воде.
Он насчитал сто двадцать восемь лодок. Почему так много? Никто не знает, что произошло потом.
Το ποτάμι ήταν ψηλά εκείνη την άνοιξη και το πλοίο δεν έφυγε. Τα παιδιά έτρεξαν στο νερό.
那年春天河水很高，渡船直到四月的第三个星期才开。孩子们跑到水边去了。模型比内存大，专家从磁盘读取。
我们在北京学习中文，他们在上海工作。今天的天气很好，是不是？一二三四五六七八九十，百分之五十。
その春、川の水位は高く、渡し船は四月の第三週まで動かなかった。子供たちは水辺へ走っていった。カタカナとひらがな。
東京で日本語を勉強しています。コンピュータのメモリより大きいモデルを動かす。お元気ですか？はい、元気です。
그해 봄에는 강물이 높아서 나룻배가 사월 셋째 주까지 다니지 않았다. 아이들은 물가로 달려갔다. 안녕하세요?
كان النهر مرتفعا في ذلك الربيع، ولم تعمل العبارة حتى الأسبوع الثالث من أبريل. ركض الأطفال إلى الماء.
הנהר היה גבוה באותו אביב, והמעבורת לא הפליגה עד השבוע השלישי של אפריל. הילדים רצו אל המים.
उस वसंत में नदी ऊँची थी और नाव अप्रैल के तीसरे सप्ताह तक नहीं चली। बच्चे पानी की ओर दौड़े।
ในฤดูใบไม้ผลินั้นแม่น้ำสูงมาก และเรือข้ามฟากไม่ได้วิ่งจนถึงสัปดาห์ที่สามของเดือนเมษายน
সেই বসন্তে নদী উঁচু ছিল এবং ফেরি এপ্রিলের তৃতীয় সপ্তাহ পর্যন্ত চলেনি। শিশুরা জলের দিকে দৌড়ে গেল।
அந்த வசந்த காலத்தில் ஆறு உயர்ந்திருந்தது. குழந்தைகள் தண்ணீரை நோக்கி ஓடினார்கள்.
😀😃😄 👍🏽 ❤️ 👨‍👩‍👧‍👦 🇩🇪🇯🇵 ✅ 🚀 100% → ← ≤ ≥ ≠ ∑ √ ∞ € £ ¥ © ® ™ § ¶ • … – —
1 12 123 1234 12345 123456 1234567 2024-02-29 12:34:56 3.14159 1e-5 0xFF 1,000,000 ½ ² ³ Ⅷ ٣٤٥ ४५६ 五
""".splitlines()

# Runs of white space are words of their own in most tokenizers.
LINES += ["  ", "    ", "        ", "\n\n", "\n\n\n", "\t\t", " \n", "\r\n", "\r\n\r\n", "   \n   ", ".\n\n", ");\n\n", ",\n"] * 3

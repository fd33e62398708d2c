//! Compiles the kernels for the emulator, if that is asked for; nothing otherwise.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "emulator")]
    if !lints_only() {
        emulator::build();
    }
}

/// Whether Clippy asks, which links nothing.
#[cfg(feature = "emulator")]
fn lints_only() -> bool {
    std::env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.contains("clippy-driver"))
}

#[cfg(feature = "emulator")]
mod emulator {
    use std::fs;
    use std::path::{Path, PathBuf};

    const KERNELS: &str = "src/gpu/kernels";

    /// The variable that limits tests to a backend. The CPU's need no emulated kernels.
    const TEST_ONLY: &str = "MOEFLUX_TEST_ONLY";

    /// Units of CUDA's that are not in the common dialect.
    const CUDA_UNITS: [&str; 3] = ["cuda/joint_experts", "cuda/joint_rows", "cuda/early"];

    /// A unit of plain CUDA C++ for tensor cores.
    struct TensorUnit {
        name: &'static str,
        /// It is compiled for each of these, if for several.
        encodings: &'static [&'static str],
        kernels: &'static [&'static str],
        /// Whether kernels wait for the dispatches before by themselves.
        waits: bool,
        /// What it calls the memory that dispatches ask for.
        asked: Option<&'static str>,
        /// What the only instruction of its own does.
        instruction: Option<&'static str>,
    }

    impl TensorUnit {
        const fn new(name: &'static str, kernels: &'static [&'static str]) -> Self {
            Self { name, encodings: &[], kernels, waits: true, asked: None, instruction: None }
        }
    }

    const TENSOR_UNITS: &[TensorUnit] = &[
        TensorUnit::new("cuda/blocks", &["blocks_of"]),
        TensorUnit::new("cuda/enter_experts", &["enter_experts"]),
        TensorUnit { waits: false, ..TensorUnit::new("cuda/prefill", &["to_f16", "tensor_sort"]) },
        TensorUnit {
            waits: false,
            asked: Some("float shared"),
            instruction: Some("emulator::multiply_tf32(d, a, b)"),
            ..TensorUnit::new("cuda/exact", &["exact_linear_32", "exact_linear_64"])
        },
        TensorUnit {
            encodings: &["q4_k", "q6_k"],
            asked: Some("uint4 shared"),
            instruction: Some("mma_16816(d, a, b0, b1)"),
            ..TensorUnit::new(
                "cuda/products",
                &["panel_products_16", "panel_products_32", "panel_products_64"],
            )
        },
        TensorUnit {
            encodings: &["q4_k", "q6_k", "iq2_xxs", "affine4"],
            asked: Some("u8 dynamic"),
            ..TensorUnit::new(
                "cuda/expert_panels",
                &[
                    "stream_gate_up_8",
                    "stream_gate_up_16",
                    "stream_gate_up_8_wide",
                    "stream_gate_up_16_wide",
                    "stream_gate_up_8_eights",
                    "stream_gate_up_16_eights",
                    "stream_down_8",
                    "stream_down_16",
                    "stream_down_16_few",
                    "stream_down_8_wide",
                    "stream_down_16_wide",
                ],
            )
        },
        TensorUnit {
            encodings: &["q4_k", "q6_k"],
            asked: Some("uint4 shared"),
            ..TensorUnit::new("cuda/panels", &["panel_gate_up", "panel_down"])
        },
    ];

    /// Whether the emulator has what variables that threads share are to it.
    fn runs_tensor_units() -> bool {
        std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux")
    }

    /// A folder with CUDA's text, where stand-ins take the places of some files, which are `text_of_` them then.
    fn stage(out: &Path) -> PathBuf {
        let to = out.join("tensor");
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(to.join("cuda")).expect("a folder in OUT_DIR");
        let files = fs::read_dir(format!("{KERNELS}/cuda")).expect("CUDA's kernels");
        for file in files.map(|file| file.expect("a file").file_name()) {
            let file = file.to_str().expect("a plain name");
            let [text, stand_in] = ["", "emulator/"].map(|from| format!("{KERNELS}/{from}cuda/{file}"));
            let is_replaced = Path::new(&stand_in).exists();
            if is_replaced {
                fs::copy(&stand_in, to.join("cuda").join(file)).expect("a copy");
            }
            let name = if is_replaced { format!("text_of_{file}") } else { file.to_owned() };
            fs::copy(&text, to.join("cuda").join(name)).expect("a copy");
        }
        to
    }

    /// A unit's text with a fault in it, or in a file that it includes.
    fn with_fault(text: &str, Fault { unit, name, replace: (from, to) }: &Fault) -> String {
        let mut text = text.to_owned();
        if !text.contains(from) {
            let names = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
            let mut files = names.map(|name| (name, fs::read_to_string(format!("{KERNELS}/cuda/{name}"))));
            let found =
                files.find_map(|(name, file)| Some((name, file.ok().filter(|file| file.contains(from))?)));
            let (name, file) = found.expect("a place for the fault");
            text = text.replace(&format!("#include \"{name}\""), &file.replace("#pragma once", ""));
        }
        assert_eq!(text.matches(from).count(), 1, "{unit}: one place for the fault {name}");
        text.replace(from, to)
    }

    /// The file that a unit's text is compiled from, for an encoding, and what names its kernels.
    fn tensor_body(unit: &TensorUnit, encoding: &str, symbol: &str, text: &str) -> String {
        // What is the same for all units; the rest of what units include they have for themselves.
        let mut body = String::from("#include \"emulator/copies.h\"\n#include \"emulator/bits.h\"\n");
        let space = format!("in_{symbol}");
        body += &format!("namespace {space} {{\n#include \"emulator/sums.h\"\n");
        let end = if encoding.is_empty() { String::new() } else { format!("_{encoding}") };
        if encoding.is_empty() {
            unit.kernels.iter().for_each(|kernel| body += &format!("#define {kernel} {kernel}_{symbol}\n"));
        } else {
            body += &format!("#define DTYPE {}\n#define NAME(f) f##_{symbol}\n", encoding.to_uppercase());
        }
        if let Some(asked) = unit.asked {
            body += "#include \"cuda/tensor_core.h\"\n";
            body += &format!("extern thread_local {asked}[] asm(\"moeflux_asked\");\n");
        }
        if let Some(instruction) = unit.instruction {
            // With `volatile` between or without.
            let is_volatile = text.contains("asm volatile(\n");
            let (name, none) = if is_volatile { ("volatile", "#define asm\n") } else { ("asm", "") };
            body += &format!("{none}#define {name}(...) {instruction}\n");
        }
        body += &format!("{text}\n}}\n");
        let waits = unit.waits;
        for kernel in unit.kernels {
            body += &format!(
                "static const emulator::Plain<{space}::{kernel}_{symbol}, {waits}> registered_{kernel}(mf_kernels, \"{kernel}{end}\");\n"
            );
        }
        body + &format!("extern \"C\" const emulator::Kernel* {symbol}() {{ return mf_kernels; }}\n")
    }

    /// Faults planted in copies of units, each of which a test must see caught.
    struct Fault {
        unit: &'static str,
        name: &'static str,
        /// Text in the unit, and what stands in its place.
        replace: (&'static str, &'static str),
    }

    const FAULTS: &[Fault] = &[
        Fault {
            unit: "delta_rule",
            name: "no_barrier",
            replace: ("at, m, ahead);\n        barrier(ctx);", "at, m, ahead);"),
        },
        Fault {
            unit: "linear",
            name: "stride",
            replace: ("token0 + line : 0) * c.weight.cols;", "token0 + line : 0) * (c.weight.cols - 1);"),
        },
        Fault {
            unit: "streams",
            name: "no_barrier",
            replace: ("        barrier(ctx);\n        if (own < n) {", "        if (own < n) {"),
        },
        Fault {
            unit: "compressed",
            name: "no_barrier",
            replace: (
                "        barrier(ctx);\n        const uint count = end - tile",
                "        const uint count = end - tile",
            ),
        },
        Fault {
            unit: "ngrams",
            name: "bound",
            replace: ("held + before - own - 1]", "held + before - own]"),
        },
        Fault {
            unit: "metal/gemm",
            name: "gemm_barrier",
            replace: ("        barrier(ctx);\n        for (uint k = 0;", "        for (uint k = 0;"),
        },
        Fault {
            unit: "metal/gemm",
            name: "gemm_line",
            replace: (
                "first_w + 8 * b, W_LINE);\n            for",
                "first_w + 8 * b, X_LINE);\n            for",
            ),
        },
        Fault {
            unit: "cuda/joint_experts",
            name: "gates_not_awaited",
            replace: ("        await_copies(bar, parity);\n        parity ^= 1;", "        parity ^= 1;"),
        },
        Fault {
            unit: "cuda/joint_experts",
            name: "down_lanes_apart",
            replace: ("parity);\n            __syncwarp();", "parity);"),
        },
        Fault {
            unit: "cuda/joint_experts",
            name: "down_early",
            replace: ("    after_previous(ctx);\n    ask_activations(", "    ask_activations("),
        },
        Fault { unit: "cuda/joint_rows", name: "share_not_awaited", replace: ("    await_async();\n}", "}") },
        Fault {
            unit: "cuda/early",
            name: "one_more_copied",
            replace: ("(end - begin) * stride, bar);", "(end - begin) * stride + 16, bar);"),
        },
        Fault {
            unit: "cuda/products",
            name: "products_no_barrier",
            replace: (
                "copy_async_wait<STAGES - 2>();\n        __syncthreads();",
                "copy_async_wait<STAGES - 2>();",
            ),
        },
        Fault {
            unit: "cuda/products",
            name: "products_not_awaited",
            replace: ("copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
        },
        Fault {
            unit: "cuda/products",
            name: "products_copy_too_long",
            replace: ("i < count * PARTS * GROUP_UNITS;", "i < 4 * count * PARTS * GROUP_UNITS;"),
        },
        Fault {
            unit: "cuda/products",
            name: "products_row",
            replace: (
                "PANEL * m + 8 * i + lane / 4, part.rows - 1)",
                "PANEL * m + 8 * i + lane / 4 + 1, part.rows - 1)",
            ),
        },
        Fault {
            unit: "cuda/products",
            name: "products_fragment",
            replace: ("second[m], b[n].z, b[n].w);", "second[m], b[n].w, b[n].z);"),
        },
        Fault {
            unit: "cuda/products",
            name: "products_lanes_apart",
            replace: (
                "multiply_add(sums.v[m][from + n], first[m], b[n].x, b[n].y);",
                "if (threadIdx.x != 7) multiply_add(sums.v[m][from + n], first[m], b[n].x, b[n].y);",
            ),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_not_awaited",
            replace: ("        ring_wait(full(stage), order / RING_STAGES & 1);\n", ""),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_still_read",
            replace: ("            ring_wait(free(next % RING_STAGES), next / RING_STAGES - 1 & 1);\n", ""),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_sums_not_made",
            replace: ("            ring_wait(made(half ^ 1), (order - 1) / 2 & 1);\n", ""),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_copy_too_long",
            replace: (
                "bytes = (rows >> s.halvings) * stride;",
                "bytes = (rows >> s.halvings) * stride + 16;",
            ),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_factors",
            replace: ("factors[unit.turn & 1][threadIdx.x] = factor", "factors[0][threadIdx.x] = factor"),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_row",
            replace: (
                "return {piece, of_piece, piece * (ROWS >> s.halvings) + of_piece};",
                "return {piece, of_piece, (piece * (ROWS >> s.halvings) + of_piece) ^ 1};",
            ),
        },
        Fault {
            unit: "cuda/expert_panels",
            name: "stream_scale",
            replace: ("own.v[n][i] * scales[n][i & 1]", "own.v[n][i] * scales[n][i >> 1]"),
        },
        Fault {
            unit: "elementwise",
            name: "bound",
            replace: ("if (i < c.count) out[i] = a[i] + b[i];", "if (i <= c.count) out[i] = a[i] + b[i];"),
        },
        Fault {
            unit: "few_rows",
            name: "early",
            replace: (
                "    after_previous(ctx);\n    const GPTR(const float) from = x + (ulong)token * cols;",
                "    const GPTR(const float) from = x + (ulong)token * cols;",
            ),
        },
        Fault {
            unit: "rms_norm",
            name: "divergence",
            replace: (
                "    float sum = 0.0f;\n",
                "    if (ctx.thread() == 5) return;\n    float sum = 0.0f;\n",
            ),
        },
        Fault {
            unit: "rows",
            name: "unwritten",
            replace: (
                "for (uint i = ctx.thread(); i < c.width; i += ctx.threads()) out[to + i] = x[from + i];",
                "for (uint i = ctx.thread(); i + 1 < c.width; i += ctx.threads()) out[to + i] = x[from + i];",
            ),
        },
    ];

    /// Compilers of sound units, and of those with a fault, which run once and are compiled faster.
    struct Compilers {
        sound: cc::Build,
        faulty: cc::Build,
    }

    impl Compilers {
        fn new(std: &str, arrange: impl Fn(&mut cc::Build)) -> Self {
            let [sound, faulty] = [1, 0].map(|level| {
                let mut build = cc::Build::new();
                build.cpp(true).std(std).flag("-ffp-contract=off");
                build.opt_level(level).warnings(false).debug(false);
                // Threads find their own variables without a call in programs, and at any size in libraries loaded later.
                build.flag_if_supported("-mtls-dialect=gnu2");
                arrange(&mut build);
                build
            });
            Self { sound, faulty }
        }

        fn of(&mut self, faulty: bool) -> &mut cc::Build {
            if faulty { &mut self.faulty } else { &mut self.sound }
        }
    }

    pub(crate) fn build() {
        println!("cargo::rerun-if-changed={KERNELS}");
        println!("cargo::rerun-if-env-changed={TEST_ONLY}");
        let out = std::env::var("OUT_DIR").expect("set by cargo");
        let out = Path::new(&out);
        let mut common = Compilers::new("c++17", |build| {
            build.define("MOEFLUX_EMULATOR", None).include(KERNELS);
        });
        // What every access and every switch of threads goes through.
        let mut machine = common.sound.clone();
        machine.opt_level(2);
        machine
            .files(["runtime", "copies", "variables"].map(|file| format!("{KERNELS}/emulator/{file}.cpp")));
        // The text that Metal gets, in the C++ that it is, with every access to memory reported.
        let mut metal = Compilers::new("c++14", |build| {
            build
                .define("__METAL_VERSION__", "300")
                .include(format!("{KERNELS}/emulator/metal"))
                .include(KERNELS);
            build.flag("-fsanitize=thread").flag("-fno-exceptions").flag("-Wno-attributes");
            build.flag_if_supported("-fno-tree-vectorize");
        });
        // The text of units that are CUDA's alone, likewise, with stand-ins for instructions.
        let mut cuda = Compilers::new("c++17", |build| {
            build.define("MOEFLUX_EMULATOR", None).define("MOEFLUX_PLAIN_POINTERS", None);
            // What takes an instruction's place is found before it.
            build.includes(["/cuda", "/emulator", ""].map(|folder| format!("{KERNELS}{folder}")));
            build.flag("-fsanitize=thread").flag("-fno-exceptions").flag("-fno-strict-aliasing");
            build.flag_if_supported("-fno-tree-vectorize");
        });
        // The same for tensor cores, of which all but copies are functions that stand in for instructions.
        let staged = stage(out);
        let mut tensor = Compilers::new("c++17", |build| {
            build.define("MOEFLUX_EMULATOR", None).define("MOEFLUX_PLAIN_POINTERS", None);
            build.define("__CUDA_ARCH__", "900").include(&staged).include(staged.join("cuda"));
            build.includes(["/cuda", "/emulator", ""].map(|folder| format!("{KERNELS}{folder}")));
            build.flag("-fsanitize=thread").flag("-fno-exceptions").flag("-fno-strict-aliasing");
            build.flag_if_supported("-fno-tree-vectorize").flag_if_supported("-fno-extern-tls-init");
        });
        let (mut table, mut declarations) = (String::new(), String::new());
        let mut add = |unit: &str, symbol: &str, text: &str, faulty: bool| {
            let is_cudas = unit.split('!').next().is_some_and(|unit| CUDA_UNITS.contains(&unit));
            let is_metals = unit.starts_with("metal/");
            let texts = [
                (!is_cudas && !is_metals, &mut common, unit.to_owned(), symbol.to_owned()),
                (is_cudas, &mut cuda, unit.to_owned(), symbol.to_owned()),
                (!unit.starts_with("cuda/"), &mut metal, format!("metal/{unit}"), format!("{symbol}_metal")),
            ];
            for (_, compilers, unit, symbol) in texts.into_iter().filter(|(takes, ..)| *takes) {
                let path = out.join(format!("{symbol}.cpp"));
                let body = format!(
                    "#include \"emulator/sums.h\"\n{text}\nextern \"C\" const emulator::Kernel* {symbol}() {{ return mf_kernels; }}\n"
                );
                write_if_changed(&path, &body);
                compilers.of(faulty).file(&path);
                declarations += &format!("extern \"C\" const emulator::Kernel* {symbol}();\n");
                table += &format!("    if (!strcmp(name, \"{unit}\")) return {symbol}();\n");
            }
        };
        let emulates = std::env::var(TEST_ONLY).map_or(true, |only| only != "CPU");
        // Sound units first: of functions that units share the linker keeps the first, which is then the optimised one.
        for unit in units().into_iter().filter(|_| emulates) {
            add(&unit, &symbol_of(&unit), &format!("#include \"{}\"", file_of(&unit)), false);
        }
        let is_tensors = |unit: &str| TENSOR_UNITS.iter().any(|own| own.name == unit);
        let plain_faults = FAULTS.iter().filter(|fault| emulates && !is_tensors(fault.unit));
        for Fault { unit, name, replace: (from, to) } in plain_faults {
            let text = fs::read_to_string(format!("{KERNELS}/{}", file_of(unit))).expect("a unit's text");
            assert_eq!(text.matches(from).count(), 1, "{unit}: one place for the fault {name}");
            let symbol = format!("{}_fault_{name}", symbol_of(unit));
            add(&format!("{unit}!{name}"), &symbol, &text.replace(from, to), true);
        }
        for unit in TENSOR_UNITS.iter().filter(|_| emulates && runs_tensor_units()) {
            let file = format!("{}.cu", unit.name);
            let text = fs::read_to_string(format!("{KERNELS}/{file}")).expect("a unit's text");
            let sound = (String::new(), text.clone());
            let faults = FAULTS.iter().filter(|fault| fault.unit == unit.name);
            let faults = faults.map(|fault| (fault.name.to_owned(), with_fault(&text, fault)));
            for (fault, text) in std::iter::once(sound).chain(faults) {
                // One encoding has the faults of all.
                let several = if fault.is_empty() { unit.encodings.len() } else { 1 };
                let encodings = if unit.encodings.is_empty() { &[""] } else { &unit.encodings[..several] };
                for encoding in encodings {
                    let [symbol_end, mut name] = if encoding.is_empty() {
                        [String::new(), unit.name.to_owned()]
                    } else {
                        [format!("_{encoding}"), format!("{}@{encoding}", unit.name)]
                    };
                    let mut symbol = format!("{}{symbol_end}", symbol_of(unit.name));
                    if !fault.is_empty() {
                        symbol += &format!("_fault_{fault}");
                        name += &format!("!{fault}");
                    }
                    let path = out.join(format!("{symbol}.cpp"));
                    write_if_changed(&path, &tensor_body(unit, encoding, &symbol, &text));
                    tensor.of(!fault.is_empty()).file(&path);
                    declarations += &format!("extern \"C\" const emulator::Kernel* {symbol}();\n");
                    table += &format!("    if (!strcmp(name, \"{name}\")) return {symbol}();\n");
                }
            }
        }
        let table = format!(
            "#include \"emulator/machine.h\"\n{declarations}extern \"C\" const emulator::Kernel* \
             moeflux_emulator_unit(const char* name) {{\n{table}    return nullptr;\n}}\n"
        );
        let path = out.join("moeflux_units.cpp");
        write_if_changed(&path, &table);
        let mut build = common.sound;
        build.file(&path);
        for others in [
            machine,
            common.faulty,
            metal.sound,
            metal.faulty,
            cuda.sound,
            cuda.faulty,
            tensor.sound,
            tensor.faulty,
        ] {
            for object in others.compile_intermediates() {
                build.object(object);
            }
        }
        build.compile("moeflux_emulator");
    }

    fn file_of(unit: &str) -> String {
        format!("{unit}.{}", if CUDA_UNITS.contains(&unit) { "cu" } else { "h" })
    }

    fn symbol_of(unit: &str) -> String {
        format!("moeflux_unit_{}", unit.replace('/', "_"))
    }

    /// Names in the `units!` list of `mod.rs`, then CUDA's that the emulator runs, then Metal's own.
    fn units() -> Vec<String> {
        let text = fs::read_to_string(format!("{KERNELS}/mod.rs")).expect("the list of units");
        let list = text.split_once("units![").expect("the list of units").1;
        let list = list.split_once(']').expect("its end").0;
        let common = list.split('"').skip(1).step_by(2).chain(["cuda/batched", "metal/gemm"]);
        common.chain(CUDA_UNITS).map(str::to_owned).collect()
    }

    fn write_if_changed(path: &Path, text: &str) {
        if fs::read_to_string(path).ok().as_deref() != Some(text) {
            fs::write(path, text).expect("write to OUT_DIR");
        }
    }
}

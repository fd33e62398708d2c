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
    use std::path::Path;

    const KERNELS: &str = "src/gpu/kernels";

    /// The variable that limits tests to a backend. The CPU's need no emulated kernels.
    const TEST_ONLY: &str = "MOEFLUX_TEST_ONLY";

    /// Units of CUDA's that are not in the common dialect.
    const CUDA_UNITS: [&str; 3] = ["cuda/joint_experts", "cuda/joint_rows", "cuda/early"];

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
                // What each thread of the machine has is loaded with the program: no call to find it.
                build.flag_if_supported("-ftls-model=initial-exec");
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
        machine.files(["runtime", "copies"].map(|file| format!("{KERNELS}/emulator/{file}.cpp")));
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
        for Fault { unit, name, replace: (from, to) } in FAULTS.iter().filter(|_| emulates) {
            let text = fs::read_to_string(format!("{KERNELS}/{}", file_of(unit))).expect("a unit's text");
            assert_eq!(text.matches(from).count(), 1, "{unit}: one place for the fault {name}");
            let symbol = format!("{}_fault_{name}", symbol_of(unit));
            add(&format!("{unit}!{name}"), &symbol, &text.replace(from, to), true);
        }
        let table = format!(
            "#include \"emulator/machine.h\"\n{declarations}extern \"C\" const emulator::Kernel* \
             moeflux_emulator_unit(const char* name) {{\n{table}    return nullptr;\n}}\n"
        );
        let path = out.join("moeflux_units.cpp");
        write_if_changed(&path, &table);
        let mut build = common.sound;
        build.file(&path);
        for others in [machine, common.faulty, metal.sound, metal.faulty, cuda.sound, cuda.faulty] {
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

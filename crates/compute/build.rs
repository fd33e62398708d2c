//! Compiles the kernels for the emulator, if that is asked for; nothing otherwise.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "emulator")]
    emulator::build();
}

#[cfg(feature = "emulator")]
mod emulator {
    use std::fs;
    use std::path::Path;

    const KERNELS: &str = "src/gpu/kernels";

    /// Faults planted in copies of units, each of which a test must see caught.
    struct Fault {
        unit: &'static str,
        name: &'static str,
        /// Text in the unit, and what stands in its place.
        replace: (&'static str, &'static str),
    }

    const FAULTS: &[Fault] = &[
        Fault {
            unit: "recurrent",
            name: "no_barrier",
            replace: ("        barrier(ctx);\n        if (active) {", "        if (active) {"),
        },
        Fault {
            unit: "linear",
            name: "stride",
            replace: ("ws[a] = tile_w[k * 65 + my_row", "ws[a] = tile_w[k * 64 + my_row"),
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
                "    after_previous(ctx);\n    const float factor = enter_floats(",
                "    const float factor = enter_floats(",
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

    pub(crate) fn build() {
        println!("cargo::rerun-if-changed={KERNELS}");
        let out = std::env::var("OUT_DIR").expect("set by cargo");
        let out = Path::new(&out);
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").include(KERNELS).define("MOEFLUX_EMULATOR", None);
        build.opt_level(2).flag("-ffp-contract=off").warnings(false).debug(false);
        let (mut table, mut declarations) = (String::new(), String::new());
        let mut add = |unit: &str, symbol: &str, text: &str| {
            let path = out.join(format!("{symbol}.cpp"));
            let body =
                format!("{text}\nextern \"C\" const emulator::Kernel* {symbol}() {{ return mf_kernels; }}\n");
            write_if_changed(&path, &body);
            build.file(&path);
            declarations += &format!("extern \"C\" const emulator::Kernel* {symbol}();\n");
            table += &format!("    if (!strcmp(name, \"{unit}\")) return {symbol}();\n");
        };
        for unit in units() {
            let path = format!("{KERNELS}/{unit}.h");
            add(&unit, &format!("moeflux_unit_{unit}"), &format!("#include \"{unit}.h\""));
            let text = fs::read_to_string(&path).expect("a unit's text");
            for fault in FAULTS.iter().filter(|fault| fault.unit == unit) {
                let (from, to) = fault.replace;
                assert_eq!(text.matches(from).count(), 1, "{unit}: one place for the fault {}", fault.name);
                let symbol = format!("moeflux_unit_{unit}_fault_{}", fault.name);
                add(&format!("{unit}!{}", fault.name), &symbol, &text.replace(from, to));
            }
        }
        let table = format!(
            "#include \"emulator/dialect.h\"\n{declarations}extern \"C\" const emulator::Kernel* \
             moeflux_emulator_unit(const char* name) {{\n{table}    return nullptr;\n}}\n"
        );
        let path = out.join("moeflux_units.cpp");
        write_if_changed(&path, &table);
        build.file(&path).file(format!("{KERNELS}/emulator/runtime.cpp"));
        build.compile("moeflux_emulator");
    }

    /// Names in the `units!` list of `mod.rs`.
    fn units() -> Vec<String> {
        let text = fs::read_to_string(format!("{KERNELS}/mod.rs")).expect("the list of units");
        let list = text.split_once("units![").expect("the list of units").1;
        let list = list.split_once(']').expect("its end").0;
        list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
    }

    fn write_if_changed(path: &Path, text: &str) {
        if fs::read_to_string(path).ok().as_deref() != Some(text) {
            fs::write(path, text).expect("write to OUT_DIR");
        }
    }
}

//! What kernels are told beside their buffers: the constants of each, as a struct with the fields of the kernel's own.
//!
//! A struct here names the places in `kernels/` that declare the same one; a test compares names, order and types of all
//! fields. A size or a flag is 32 bits wide there, `uint` or `float`.

/// Declares structs: places of the same struct among the kernels, what it is, its fields.
macro_rules! arguments {
    ($(
        [$($file:literal $own:ident),+]
        $(#[$doc:meta])*
        $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),+ $(,)? }
    )+) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, Default, PartialEq)]
            pub(crate) struct $name {
                $($(#[$field_doc])* pub(crate) $field: $type),+
            }

            impl crate::gpu::device::Words for $name {
                fn append(&self, out: &mut Vec<u8>) {
                    $(self.$field.append(out);)+
                }
            }

            #[cfg(test)]
            impl super::tests::Described for $name {
                fn c_type() -> String {
                    [$(stringify!($own)),+][0].into()
                }
            }
        )+

        #[cfg(test)]
        pub(super) fn declared() -> Vec<super::tests::Declared> {
            use super::tests::Described;
            vec![$(super::tests::Declared {
                places: vec![$(($file, stringify!($own))),+],
                fields: vec![$((stringify!($field).trim_start_matches("r#"), <$type>::c_type())),+],
            }),+]
        }
    };
}

mod attention;
mod experts;
mod linear;
mod recurrent;
mod routing;
mod rows;
mod shared;

pub(crate) use self::attention::*;
pub(crate) use self::experts::*;
pub(crate) use self::linear::*;
pub(crate) use self::recurrent::*;
pub(crate) use self::routing::*;
pub(crate) use self::rows::*;
pub(crate) use self::shared::*;

#[cfg(test)]
fn declared() -> Vec<tests::Declared> {
    let all = [
        attention::declared(),
        experts::declared(),
        linear::declared(),
        recurrent::declared(),
        routing::declared(),
        rows::declared(),
        shared::declared(),
    ];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::declared;

    /// What a type is called among the kernels.
    pub(super) trait Described {
        fn c_type() -> String;
    }

    macro_rules! described {
        ($($type:ty => $name:literal),+) => {
            $(impl Described for $type {
                fn c_type() -> String {
                    $name.into()
                }
            })+
        };
    }
    described!(u32 => "uint", usize => "uint", bool => "uint", f32 => "float");

    impl<T: Described, const N: usize> Described for [T; N] {
        fn c_type() -> String {
            format!("{}[{N}]", T::c_type())
        }
    }

    /// A struct of this file: its places, and its fields with their types.
    pub(super) struct Declared {
        pub(super) places: Vec<(&'static str, &'static str)>,
        pub(super) fields: Vec<(&'static str, String)>,
    }

    fn kernels() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/kernels")
    }

    fn text_of(file: &str) -> String {
        let text = fs::read_to_string(kernels().join(file)).unwrap();
        text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
    }

    /// Fields of a struct of the kernels with their types.
    fn fields(file: &str, name: &str) -> Vec<(String, String)> {
        let text = text_of(file);
        let (_, body) =
            text.split_once(&format!("struct {name} {{")).unwrap_or_else(|| panic!("{file}: {name}"));
        let body = body.split_once("};").unwrap().0;
        let mut all = vec![];
        for declaration in body.split(';').map(str::trim).filter(|declaration| !declaration.is_empty()) {
            let (of, names) = declaration.split_once(' ').unwrap();
            let of = if matches!(of, "u32" | "unsigned") { "uint" } else { of };
            for name in names.split(',').map(str::trim) {
                match name.split_once('[') {
                    Some((name, count)) => {
                        let count = count.trim_end_matches(']');
                        let count = count.parse().unwrap_or_else(|_| constant(&text, count));
                        all.push((name.to_owned(), format!("{of}[{count}]")));
                    }
                    None => all.push((name.to_owned(), of.to_owned())),
                }
            }
        }
        all
    }

    /// A constant of a file of kernels, or of one that it includes.
    fn constant(text: &str, name: &str) -> usize {
        let Some((_, value)) = text.split_once(&format!("{name} = ")) else {
            let included = text.lines().filter_map(|line| line.strip_prefix("#include \""));
            let files = included.map(|file| file.trim_end_matches('"').trim_start_matches("../"));
            let texts: Vec<String> =
                files.filter(|file| kernels().join(file).exists()).map(text_of).collect();
            return constant(&texts.concat(), name);
        };
        value.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }

    #[test]
    fn fields_are_those_of_the_kernels() {
        for Declared { places, fields: own } in declared() {
            let own: Vec<(String, String)> =
                own.into_iter().map(|(name, of)| (name.to_owned(), of)).collect();
            for (file, name) in places {
                assert_eq!(own, fields(file, name), "{file}: {name}");
            }
        }
    }

    /// What a macro is given second.
    fn second(rest: &str) -> Option<&str> {
        rest.split(',').nth(1).map(str::trim)
    }

    #[test]
    fn no_kernel_has_constants_of_another_kind() {
        let known: BTreeSet<&str> = declared()
            .iter()
            .flat_map(|d| d.places.iter().map(|(_, name)| *name).collect::<Vec<_>>())
            .collect();
        let mut found = 0;
        for folder in ["", "cuda", "metal"] {
            for entry in fs::read_dir(kernels().join(folder)).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                if path.is_dir() || name.starts_with('.') || name == "dialect.h" || name.ends_with(".rs") {
                    continue;
                }
                let text = text_of(path.to_str().unwrap());
                let text = text.replace('\n', " ");
                let declared = text.split(" KERNEL").skip(1).filter_map(|rest| {
                    let rest = rest.strip_prefix("_AHEAD").unwrap_or(rest).strip_prefix('(')?;
                    second(rest)
                });
                let declared = declared.filter(|constants| *constants != "constants");
                // What this macro is given for them.
                let given = text.split(" GATE_UP(").skip(1).filter_map(second);
                let declared = declared.chain(given.filter(|given| given.ends_with("Constants")));
                let passed = text.split("__grid_constant__").skip(1).map(|rest| rest.trim());
                let passed = passed.map(|rest| rest.split(' ').next().unwrap());
                for constants in declared.chain(passed) {
                    assert!(known.contains(constants.trim()), "{name}: {constants}");
                    found += 1;
                }
            }
        }
        assert!(found > 50, "{found} kernels");
    }
}

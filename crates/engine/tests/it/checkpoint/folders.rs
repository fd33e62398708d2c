//! What a path leads to, and files that change after they were opened.

use moeflux::{
    Error,
    checkpoint::{ByteRange, Format},
};
use moeflux_compute::DType;

use super::support::{Folder, RawGguf, check_error, raw_safetensors};

const SAFETENSORS: &str = r#"{"w":{"dtype":"F16","shape":[2,2,3],"data_offsets":[0,24]},
    "i":{"dtype":"I64","shape":[2],"data_offsets":[24,40]},
    "s":{"dtype":"F32","shape":[],"data_offsets":[40,44]}}"#;
const CONFIG: (&str, &[u8]) = ("config.json", b"{\"torch_dtype\":\"float16\"}");

#[test]
fn paths() {
    let gguf = RawGguf::valid().bytes();
    let safetensors = raw_safetensors(SAFETENSORS, 44);
    let check = |files: &[(&str, &[u8])], open: &str, expected: Result<Format, &str>| {
        let folder = Folder::new(files);
        let result = folder.open(open);
        match expected {
            Ok(format) => assert_eq!(result.expect(open).format(), format, "{open}"),
            Err(expected) => check_error(open, result, "", expected),
        }
    };
    let model = ("model.safetensors", &safetensors[..]);
    check(&[("m.gguf", &gguf)], "", Ok(Format::Gguf));
    check(&[("m.bin", &gguf)], "m.bin", Ok(Format::Gguf));
    check(&[("m.gguf", &gguf), ("mmproj-m.gguf", b"")], "", Ok(Format::Gguf));
    check(&[("m.gguf", &gguf), CONFIG], "", Ok(Format::Gguf));
    check(&[("m.gguf", &gguf), CONFIG, ("adapter.safetensors", b"")], "", Ok(Format::Gguf));
    check(&[model, CONFIG], "", Ok(Format::HuggingFace));
    check(&[model, CONFIG], "model.safetensors", Ok(Format::HuggingFace));
    check(&[("other.safetensors", &safetensors), CONFIG], "", Ok(Format::HuggingFace));
    check(
        &[("m.gguf", &gguf), ("n.gguf", &gguf)],
        "",
        Err("one model, or the name of a file in it, got 2 GGUF models and no safetensors"),
    );
    check(&[("m.gguf", &gguf), model, CONFIG], "", Err("1 GGUF models and a safetensors model"));
    check(&[("m.gguf", &gguf), model, CONFIG], "m.gguf", Ok(Format::Gguf));
    check(&[], "", Err("got 0 GGUF models and no safetensors model"));
    check(&[], "absent", Err("cannot open"));
    check(&[("text", b"hello world")], "text", Err("magic: expected \"GGUF\""));
    check(&[("empty", b"")], "empty", Err("magic: expected 4 bytes, got 0 left of the file"));
}

#[test]
fn folders_and_devices_are_no_model_files() {
    let folder = Folder::new(&[CONFIG]);
    std::fs::create_dir(folder.file("model.safetensors")).expect("folder");
    check_error("folder", folder.open(""), "model.safetensors", "expected a regular file, got a folder");
    std::os::unix::fs::symlink("/dev/null", folder.file("device.gguf")).expect("link");
    let device = folder.open("device.gguf");
    check_error("device", device, "device.gguf", "expected a regular file, got a special file");
}

#[test]
fn mlx_says_so_in_its_metadata() {
    let json = SAFETENSORS.replacen('{', r#"{"__metadata__":{"format":"mlx"},"#, 1);
    let folder = Folder::new(&[("model.safetensors", &raw_safetensors(&json, 44)), CONFIG]);
    assert_eq!(folder.open("").expect("open").format(), Format::Mlx);
}

#[test]
fn stacks_and_rows_are_parts_of_every_plane() {
    let mut file = raw_safetensors(SAFETENSORS, 0);
    let data = file.len() as u64;
    file.extend(0..44u8);
    let folder = Folder::new(&[("model.safetensors", &file), CONFIG]);
    let checkpoint = folder.open("").expect("open");
    assert_eq!(checkpoint.config()["torch_dtype"], "float16");

    let whole = checkpoint.weight("w").expect("w").expect("there");
    assert_eq!((whole.dtype, &whole.shape[..], whole.bytes()), (DType::F16, &[2, 2, 3][..], 24));
    let second = whole.stack_element(1).expect("second of two");
    assert_eq!((&second.name[..], &second.shape[..]), ("w[1]", &[2, 3][..]));
    assert_eq!(second.planes, [ByteRange { file: 0, offset: data + 12, len: 12, by_columns: None }]);
    assert_eq!(whole.stack_element(2), None);
    assert_eq!(second.stack_element(0), None);
    let row = second.row_range(1..2).expect("second row");
    assert_eq!(row.planes, [ByteRange { file: 0, offset: data + 18, len: 6, by_columns: None }]);
    assert_eq!((second.row_range(1..3), whole.row_range(0..1)), (None, None));
    let tensor = checkpoint.read_weight(&row).expect("read");
    assert_eq!((tensor.rows(), tensor.cols(), tensor.view().plane(0)), (1, 3, &[18, 19, 20, 21, 22, 23][..]));

    let all = checkpoint.tensor("w").expect("w").expect("there");
    assert_eq!((all.rows(), all.cols()), (4, 3));
    let scalar = checkpoint.tensor("s").expect("s").expect("there");
    assert_eq!((scalar.rows(), scalar.cols()), (1, 1));
    assert!(checkpoint.weight("absent").expect("no error").is_none());
    assert!(checkpoint.contains("i") && !checkpoint.contains("absent"));
    check_error("integers", checkpoint.tensor("i"), "model.safetensors", "tensor i: expected an encoding");
}

#[test]
fn a_file_that_shrinks_is_a_read_error() {
    let folder = Folder::new(&[("m.gguf", &RawGguf::valid().bytes())]);
    let checkpoint = folder.open("m.gguf").expect("open");
    let range = checkpoint.weight("b").expect("b").expect("there").planes[0];
    std::fs::OpenOptions::new()
        .write(true)
        .open(folder.file("m.gguf"))
        .and_then(|file| file.set_len(range.offset + 100))
        .expect("shrink");
    let mut out = vec![0; range.len as usize];
    let Err(Error::Read { path, offset, wanted, got, .. }) = checkpoint.read(&range, &mut out) else {
        panic!("expected a read error")
    };
    assert_eq!((path, offset, wanted, got), (folder.file("m.gguf"), range.offset, 136, 100));
    check_error("tensor", checkpoint.tensor("b"), "m.gguf", "136 bytes at offset");
    check_error("buffer", checkpoint.read(&range, &mut out[1..]), "m.gguf", "the range has 136 bytes");
}

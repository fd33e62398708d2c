//! Elements of stacks that are kept in tensors of their own.
//!
//! A stack is a tensor with a dimension for experts. Where every expert is to be one range of the file, a stack is
//! instead a tensor for each element, whose name is the stack's with the element's number in it.

use super::Format;

/// What may follow the name of a stack's module, longest first.
const PARTS: [&str; 6] = [".weight_scale_inv", ".weight", ".scales", ".scale", ".biases", "_scale_inv"];

/// Name of element `index` of the stack `name`: `blk.0.ffn_up.3.weight` for `blk.0.ffn_up_exps.weight` of GGUF files,
/// `mlp.switch_mlp.up_proj.3.scales` for `mlp.switch_mlp.up_proj.scales` of others.
pub(crate) fn element_name(format: Format, name: &str, index: usize) -> String {
    if format == Format::Gguf {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        return format!("{}.{index}.weight", module.strip_suffix("_exps").unwrap_or(module));
    }
    let part = PARTS.into_iter().find(|part| name.ends_with(part)).unwrap_or("");
    format!("{}.{index}{part}", &name[..name.len() - part.len()])
}

/// The stack that the module of an element belongs to; `None` for other modules.
pub(crate) fn stack_of(module: &str) -> Option<&str> {
    let (stack, index) = module.rsplit_once('.')?;
    index.bytes().all(|b| b.is_ascii_digit()).then_some(stack)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let check = |format, stack: &str, expected: &str| {
            assert_eq!(element_name(format, stack, 7), expected);
        };
        check(Format::Gguf, "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate.7.weight");
        check(Format::Mlx, "mlp.switch_mlp.up_proj.weight", "mlp.switch_mlp.up_proj.7.weight");
        check(Format::Mlx, "mlp.switch_mlp.up_proj.biases", "mlp.switch_mlp.up_proj.7.biases");
        check(Format::HuggingFace, "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj.7");
        check(
            Format::HuggingFace,
            "mlp.experts.gate_up_proj_scale_inv",
            "mlp.experts.gate_up_proj.7_scale_inv",
        );
        check(
            Format::HuggingFace,
            "mlp.experts.up_proj.weight_scale_inv",
            "mlp.experts.up_proj.7.weight_scale_inv",
        );
        assert_eq!(stack_of("mlp.switch_mlp.up_proj.7"), Some("mlp.switch_mlp.up_proj"));
        assert_eq!(stack_of("mlp.experts.7.up_proj"), None);
        assert_eq!(stack_of("lm_head"), None);
    }
}

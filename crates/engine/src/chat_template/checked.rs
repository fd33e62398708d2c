//! Templates whose every growing or expensive operation goes through a check.
//!
//! minijinja counts instructions, but one instruction may double a text or compare two large lists. So a template is
//! parsed, and rebuilt with filters of ours around what operators, filters and calls take and yield ([`Names`] says
//! which), before code is made from it. What constants would yield is not known before it is checked either: code
//! generation folds constants, but not filters. Text between tags becomes printed constants, so that all output passes
//! the formatter.
//!
//! The price is minijinja's `unstable_machinery`, whose version is therefore pinned. Other templates cannot be included,
//! as in transformers, which has none to include.

use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Block, Call, CallArg, CallBlock, Compare, CompareOp, Const, Do, EmitExpr,
    Expr, Filter, FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock,
    Slice, Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, WithBlock,
};
use minijinja::{Error, ErrorKind, Value};

/// Filters that the rebuilt template applies; templates cannot name them, as they are no identifiers.
pub(super) struct Names;

impl Names {
    /// Weighs a value, and makes a list of what is only iterable.
    pub(super) const WEIGH: &str = "weigh!value";
    /// Weighs a text, and lets everything else pass.
    pub(super) const WEIGH_TEXT: &str = "weigh!text";
    /// Weighs what is iterated, where every character of a text becomes a value.
    pub(super) const WEIGH_ITEMS: &str = "weigh!items";
    /// Python's `*`.
    pub(super) const MULTIPLY: &str = "multiply!";
}

/// The template `ast` with its checks.
///
/// # Errors
/// If it uses other templates.
pub(super) fn checked<'a>(ast: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    statement(ast)
}

fn filtered<'a>(name: &'static str, expr: Expr<'a>, args: Vec<CallArg<'a>>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(Spanned::new(Filter { name, expr: Some(expr), args }, span))
}

fn weighed(expr: Expr<'_>) -> Expr<'_> {
    filtered(Names::WEIGH, expr, vec![])
}

/// What an operation takes: weighed, unless it is a constant of the template's own text.
fn operand<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::Const(_) => expression(expr),
        _ => weighed(expression(expr)),
    }
}

fn option<'a>(expr: &Option<Expr<'a>>) -> Option<Expr<'a>> {
    expr.as_ref().map(expression)
}

fn expressions<'a>(all: &[Expr<'a>]) -> Vec<Expr<'a>> {
    all.iter().map(expression).collect()
}

fn statements<'a>(all: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
    all.iter().map(statement).collect()
}

fn arguments<'a>(all: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let argument = |argument: &CallArg<'a>| match argument {
        CallArg::Pos(expr) => CallArg::Pos(operand(expr)),
        CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, operand(expr)),
        CallArg::PosSplat(expr) => CallArg::PosSplat(operand(expr)),
        CallArg::KwargSplat(expr) => CallArg::KwargSplat(operand(expr)),
    };
    all.iter().map(argument).collect()
}

/// A call whose object and arguments are weighed.
fn call<'a>(call: &Spanned<Call<'a>>) -> Spanned<Call<'a>> {
    let callee = match &call.expr {
        Expr::GetAttr(attr) => {
            // `self` is no value: `self.name()` renders a block.
            let object = match &attr.expr {
                Expr::Var(var) if var.id == "self" => expression(&attr.expr),
                object => operand(object),
            };
            Expr::GetAttr(Spanned::new(GetAttr { expr: object, name: attr.name }, attr.span()))
        }
        other => expression(other),
    };
    Spanned::new(Call { expr: callee, args: arguments(&call.args) }, call.span())
}

fn binary<'a>(op: &Spanned<BinOp<'a>>) -> Expr<'a> {
    let rebuilt = |left, right| Expr::BinOp(Spanned::new(BinOp { op: op.op, left, right }, op.span()));
    match op.op {
        BinOpKind::ScAnd | BinOpKind::ScOr => rebuilt(expression(&op.left), expression(&op.right)),
        BinOpKind::Mul => {
            filtered(Names::MULTIPLY, operand(&op.left), vec![CallArg::Pos(operand(&op.right))])
        }
        BinOpKind::Add | BinOpKind::Concat => weighed(rebuilt(operand(&op.left), operand(&op.right))),
        _ => rebuilt(operand(&op.left), operand(&op.right)),
    }
}

fn expression<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::Var(var) => {
            let id = var.id;
            Expr::Var(Spanned::new(minijinja::machinery::ast::Var { id }, var.span()))
        }
        Expr::Const(constant) => {
            Expr::Const(Spanned::new(Const { value: constant.value.clone() }, constant.span()))
        }
        Expr::Slice(slice) => {
            let [start, stop, step] = [&slice.start, &slice.stop, &slice.step].map(option);
            let slice = Spanned::new(Slice { expr: operand(&slice.expr), start, stop, step }, slice.span());
            weighed(Expr::Slice(slice))
        }
        Expr::UnaryOp(unary) => {
            // It is neither `Copy` nor `Clone`.
            let op = if matches!(unary.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(UnaryOp { op, expr: expression(&unary.expr) }, unary.span()))
        }
        Expr::BinOp(op) => binary(op),
        Expr::Compare(compare) => {
            let op = |op: &CompareOp<'a>| CompareOp { op: op.op, expr: operand(&op.expr) };
            let ops = compare.ops.iter().map(op).collect();
            Expr::Compare(Spanned::new(Compare { expr: operand(&compare.expr), ops }, compare.span()))
        }
        Expr::IfExpr(choice) => {
            let rebuilt = IfExpr {
                test_expr: expression(&choice.test_expr),
                true_expr: expression(&choice.true_expr),
                false_expr: option(&choice.false_expr),
            };
            Expr::IfExpr(Spanned::new(rebuilt, choice.span()))
        }
        Expr::Filter(filter) => {
            let (expr, args) = (filter.expr.as_ref().map(operand), arguments(&filter.args));
            weighed(Expr::Filter(Spanned::new(Filter { name: filter.name, expr, args }, filter.span())))
        }
        Expr::Test(test) => {
            // Tests without arguments look at a value's kind, or at the letters of a text.
            let by_kind = test.args.is_empty() && !matches!(test.name, "lower" | "upper");
            let expr = if by_kind { expression(&test.expr) } else { operand(&test.expr) };
            let rebuilt = Test { name: test.name, expr, args: arguments(&test.args) };
            Expr::Test(Spanned::new(rebuilt, test.span()))
        }
        Expr::GetAttr(attr) => {
            let rebuilt = GetAttr { expr: expression(&attr.expr), name: attr.name };
            Expr::GetAttr(Spanned::new(rebuilt, attr.span()))
        }
        Expr::GetItem(item) => {
            let rebuilt = GetItem {
                expr: filtered(Names::WEIGH_TEXT, expression(&item.expr), vec![]),
                subscript_expr: expression(&item.subscript_expr),
            };
            Expr::GetItem(Spanned::new(rebuilt, item.span()))
        }
        Expr::Call(called) => weighed(Expr::Call(call(called))),
        Expr::List(list) => {
            weighed(Expr::List(Spanned::new(List { items: expressions(&list.items) }, list.span())))
        }
        Expr::Tuple(tuple) => {
            weighed(Expr::Tuple(Spanned::new(Tuple { items: expressions(&tuple.items) }, tuple.span())))
        }
        Expr::Map(map) => {
            let rebuilt =
                Map { keys: map.keys.iter().map(operand).collect(), values: expressions(&map.values) };
            weighed(Expr::Map(Spanned::new(rebuilt, map.span())))
        }
    }
}

/// What is assigned to, which is not evaluated.
fn target<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::List(list) => {
            let items = list.items.iter().map(target).collect();
            Expr::List(Spanned::new(List { items }, list.span()))
        }
        Expr::Tuple(tuple) => {
            let items = tuple.items.iter().map(target).collect();
            Expr::Tuple(Spanned::new(Tuple { items }, tuple.span()))
        }
        Expr::GetAttr(attr) => {
            let rebuilt = GetAttr { expr: target(&attr.expr), name: attr.name };
            Expr::GetAttr(Spanned::new(rebuilt, attr.span()))
        }
        other => expression(other),
    }
}

/// A filter without the value that it is applied to, which is what a block prints.
fn block_filter<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::Filter(filter) => {
            let (expr, args) = (filter.expr.as_ref().map(block_filter), arguments(&filter.args));
            weighed(Expr::Filter(Spanned::new(Filter { name: filter.name, expr, args }, filter.span())))
        }
        other => expression(other),
    }
}

fn declared<'a>(declared: &Spanned<Macro<'a>>) -> Result<Spanned<Macro<'a>>, Error> {
    let rebuilt = Macro {
        name: declared.name,
        args: declared.args.iter().map(target).collect(),
        defaults: expressions(&declared.defaults),
        body: statements(&declared.body)?,
    };
    Ok(Spanned::new(rebuilt, declared.span()))
}

fn for_loop<'a>(each: &Spanned<ForLoop<'a>>) -> Result<Stmt<'a>, Error> {
    let rebuilt = ForLoop {
        target: target(&each.target),
        iter: filtered(Names::WEIGH_ITEMS, expression(&each.iter), vec![]),
        filter_expr: option(&each.filter_expr),
        recursive: each.recursive,
        body: statements(&each.body)?,
        else_body: statements(&each.else_body)?,
    };
    Ok(Stmt::ForLoop(Spanned::new(rebuilt, each.span())))
}

fn condition<'a>(choice: &Spanned<IfCond<'a>>) -> Result<Stmt<'a>, Error> {
    let rebuilt = IfCond {
        expr: expression(&choice.expr),
        true_body: statements(&choice.true_body)?,
        false_body: statements(&choice.false_body)?,
    };
    Ok(Stmt::IfCond(Spanned::new(rebuilt, choice.span())))
}

fn set_block<'a>(set: &Spanned<SetBlock<'a>>) -> Result<Stmt<'a>, Error> {
    let rebuilt = SetBlock {
        target: target(&set.target),
        filter: set.filter.as_ref().map(block_filter),
        body: statements(&set.body)?,
    };
    Ok(Stmt::SetBlock(Spanned::new(rebuilt, set.span())))
}

fn statement<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    Ok(match stmt {
        Stmt::Template(template) => {
            let children = statements(&template.children)?;
            Stmt::Template(Spanned::new(Template { children }, template.span()))
        }
        Stmt::EmitExpr(emit) => {
            Stmt::EmitExpr(Spanned::new(EmitExpr { expr: expression(&emit.expr) }, emit.span()))
        }
        Stmt::EmitRaw(raw) => {
            let constant = Const { value: Value::from(raw.raw) };
            let expr = Expr::Const(Spanned::new(constant, raw.span()));
            Stmt::EmitExpr(Spanned::new(EmitExpr { expr }, raw.span()))
        }
        Stmt::ForLoop(each) => for_loop(each)?,
        Stmt::IfCond(choice) => condition(choice)?,
        Stmt::WithBlock(with) => {
            let assign = |(to, value): &(Expr<'a>, Expr<'a>)| (target(to), expression(value));
            let assignments = with.assignments.iter().map(assign).collect();
            let body = statements(&with.body)?;
            Stmt::WithBlock(Spanned::new(WithBlock { assignments, body }, with.span()))
        }
        Stmt::Set(set) => {
            let rebuilt = Set { target: target(&set.target), expr: expression(&set.expr) };
            Stmt::Set(Spanned::new(rebuilt, set.span()))
        }
        Stmt::SetBlock(set) => set_block(set)?,
        Stmt::AutoEscape(escape) => {
            let rebuilt =
                AutoEscape { enabled: expression(&escape.enabled), body: statements(&escape.body)? };
            Stmt::AutoEscape(Spanned::new(rebuilt, escape.span()))
        }
        Stmt::FilterBlock(block) => {
            let rebuilt = FilterBlock { filter: block_filter(&block.filter), body: statements(&block.body)? };
            Stmt::FilterBlock(Spanned::new(rebuilt, block.span()))
        }
        Stmt::Block(block) => {
            let rebuilt =
                Block { name: block.name, required: block.required, body: statements(&block.body)? };
            Stmt::Block(Spanned::new(rebuilt, block.span()))
        }
        Stmt::Macro(made) => Stmt::Macro(declared(made)?),
        Stmt::CallBlock(block) => {
            let rebuilt = CallBlock { call: call(&block.call), macro_decl: declared(&block.macro_decl)? };
            Stmt::CallBlock(Spanned::new(rebuilt, block.span()))
        }
        Stmt::Continue(at) => Stmt::Continue(Spanned::new(minijinja::machinery::ast::Continue, at.span())),
        Stmt::Break(at) => Stmt::Break(Spanned::new(minijinja::machinery::ast::Break, at.span())),
        Stmt::Do(made) => Stmt::Do(Spanned::new(Do { call: call(&made.call) }, made.span())),
        Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
            let detail = "there are no other templates to import, extend or include";
            return Err(Error::new(ErrorKind::TemplateNotFound, detail));
        }
    })
}

// Choices by an encoding's name: where `LIST_name` is defined as a comma for those of a list, `SECOND_OF(LIST_##name 1, 0, )` is 1 for
// them, else 0.
#pragma once

#define SECOND_OF(...) SECOND(__VA_ARGS__)
#define SECOND(first, second, ...) second
// What follows, if a name is one of them, or none.
#define IF_1(is, ...) IF_IS(is, __VA_ARGS__)
#define IF_IS(is, ...) IF_IS_##is(__VA_ARGS__)
#define IF_IS_1(...) __VA_ARGS__
#define IF_IS_0(...)
#define IF_0(is, ...) UNLESS(is, __VA_ARGS__)
#define UNLESS(is, ...) UNLESS_##is(__VA_ARGS__)
#define UNLESS_1(...)
#define UNLESS_0(...) __VA_ARGS__

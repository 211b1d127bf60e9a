"""Dependent launches: programs that begin before the launch before theirs has ended, and wait before they touch memory.

A launch that is over before the next one begins costs a chain of small kernels a microsecond or two each time: programs end, the
next ones are sent to their SMs, read their arguments and only then load. On chips with `Target.early_launch` a launch can ask to
begin as soon as every program of the launch before has said so or is over. A kernel declared `dependent` asks for that wherever it
is launched, and its first statement is `begin_dependent(DEPENDENT)`.

What makes it safe, though nobody knows which launches come before and after:

- Every program waits before its first access to memory, whether it has anything to do or not. `gdc_wait` returns when the launch
  before is over and all that it wrote can be read. So nothing is read before it is written, and nothing is written that the
  launch before still reads.
- It holds for all launches before that one as well. If C comes after B, and B after A: C goes on when B is over; B is over when
  all its programs are, each of which has waited for A; so A is over, too. A program of B that ends without waiting would break it,
  for C may begin before A has ended.
- A launch that does not ask to begin early, a library's or a copy, begins when the one before is over, and so when all are. After
  such a one a dependent launch waits for its end as after any other.

Hence the kernel of a pair within an operation that reads before it waits, since what it reads was there before the pair, must
come after one that is not dependent.

What may come before the wait: numbers, shared memory, and asking the L2 for bytes that are read later. The L2 is where all writes
go, so that what was asked for too early is not old.

Waiting costs nothing where there is nothing to wait for. No interpreter sees any of this; the compile net reads in the PTX of
every variant that nothing comes before the wait (`toolchain/waits.py`).
"""

import triton
import triton.language as tl

ASK = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }")


@triton.jit
def begin_dependent(DEPENDENT: tl.constexpr):
    """The first statement of a dependent kernel: lets the next launch begin, and waits for the one before."""
    let_next_begin(DEPENDENT)
    await_last(DEPENDENT)


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """The next launch may begin when all programs have come here. It is let in before this one waits: it, too, waits first of all,
    and programs that have nothing to do yet can come one after the other for several launches."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_last(DEPENDENT: tl.constexpr):
    """Wait until the launch before is over. Where warps of a program take different ways, each waits on its own way."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_l2(at, wanted):
    """Where `wanted`, ask the L2 for the line of 128 bytes that an address lies in, which must be one of a tensor's: all that a
    program may do with global memory before it waits. A thread asks for each address that it holds."""
    given = [at.to(tl.int64), wanted.to(tl.int32)]
    tl.inline_asm_elementwise(ASK, "=r,l,r", given, dtype=tl.int32, is_pure=False, pack=1)

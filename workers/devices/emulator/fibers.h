// Threads of one thread block as fibers, and everything they can wait for.
//
// Owns: the state of the running block. Runs in: tests (and the emulator device); one OS thread at a
// time. Source: this project. Blocks run one after the other; a thread runs until it waits, then the
// next one in the ring goes on. The order of the ring is a parameter: a kernel whose result changes
// with it lacks a barrier. Whatever a GPU would get wrong without a word becomes a message here.
#pragma once
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if !defined(__x86_64__) || defined(EMULATOR_PORTABLE)
#include <ucontext.h>  // correct on any processor, some 20 times slower to switch
#endif

namespace emulator {

constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_SHARED_BYTES = 232448;
constexpr unsigned MAX_COPIES = 128;     // cp.async copies in flight in one thread
constexpr unsigned MAX_MASKS = 8;        // different masks a warp may synchronise on
constexpr size_t STACK_BYTES = 64 * 1024 + 704;  // not a power of two: keeps stacks out of one cache set
constexpr uint64_t STACK_GUARD = 0x5AFE57AC4A11ULL;

struct Index { unsigned x, y, z; };

// ---- switching ---------------------------------------------------------------------------------
#if defined(__x86_64__) && !defined(EMULATOR_PORTABLE)
using Context = void*;
extern "C" void emulator_switch(Context* from, Context* to) __attribute__((visibility("hidden")));
asm(".text\n.hidden emulator_switch\n.globl emulator_switch\n.type emulator_switch,@function\n"
    "emulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov (%rsi),%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#else
using Context = ucontext_t;
static void emulator_switch(Context* from, Context* to) { swapcontext(from, to); }
#endif

struct Copy { char* to; const char* from; unsigned bytes, read_bytes; int group; };

struct Warp;
struct Fiber {
  Context context;
  Fiber *next, *previous;
  Index thread;
  unsigned lane;
  Warp* warp;
  const char* waits_in;  // null: it runs
  int num_copies, group;
  Copy copies[MAX_COPIES];
};

// Where the lanes of one mask meet. Two sets of values: a fast lane may already enter the next meeting.
struct Meeting { unsigned mask, arrived, generation; int operation; uint64_t values[2][32]; };

struct Warp {
  unsigned alive;  // lanes that have not returned
  int num_meetings;
  Meeting meetings[MAX_MASKS];
  uint32_t operands[32][8];  // of a matrix instruction
  uint32_t sums[32][4];
};

struct Barrier { unsigned arrived, generation; int votes[2]; int line; };

static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / 32];
static Barrier barrier;
static Fiber* running;
static Context launcher;
static unsigned num_threads, num_alive, num_idle_turns;
static Index block_index, block_size, grid_size;
static char *stacks, *dynamic_shared;
static unsigned dynamic_bytes;
static volatile bool in_kernel;
static char message[800];
static const char* kernel_name;
static void (*kernel_body)(void**);
static void** kernel_arguments;
static int thread_order;  // 0 ascending, 1 descending, above: shuffled by this seed, odd ones greedy
static unsigned long long num_blocks_run;

// `__shared__` variables lie in one section, which is poisoned before each block.
extern "C" char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));

[[noreturn]] static void leave_block() {
  Context dead;
  emulator_switch(&dead, &launcher);
  abort();
}

[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  const Index t = running->thread, b = block_index;
  int n = snprintf(message, sizeof message, "%s: block (%u,%u,%u) thread %u: ", kernel_name, b.x, b.y, b.z, t.x);
  va_list rest;
  va_start(rest, format);
  vsnprintf(message + n, sizeof message - n, format, rest);
  va_end(rest);
  leave_block();
}

[[noreturn]] static void deadlock() {
  char where[400] = "";
  int n = 0;
  unsigned shown = 0;
  Fiber* f = running;
  do {
    if (f->waits_in && shown++ < 4)
      n += snprintf(where + n, sizeof where - n, " thread %u in %s;", f->thread.x, f->waits_in);
    f = f->next;
  } while (f != running);
  fail("deadlock: none of the %u threads left can go on:%s", num_alive, where);
}

// Greedy orders stay in a warp while it can go on: others fall behind as far as barriers let them, which
// shows a barrier that is missing between a tile's last reader and the next tile's writer.
static inline bool is_greedy() { return thread_order > 1 && (thread_order & 1); }

static inline Fiber* next_in_warp(Fiber* me) {
  const unsigned first = (unsigned)(me - fibers) & ~31u;
  for (unsigned step = 1; step < 32; ++step) {
    const unsigned lane = (me->lane + step) & 31;
    if (me->warp->alive >> lane & 1) return &fibers[first + lane];
  }
  return me;
}

static inline void yield(bool to_own_warp = false) {
  Fiber *me = running, *to = to_own_warp && is_greedy() ? next_in_warp(me) : me->next;
  if (to == me) return;
  running = to;
  emulator_switch(&me->context, &to->context);
}

// Lets others run until `done()`. A whole round in which every thread only waited is a deadlock.
template <class Done> static inline void wait_until(Done done, const char* what, bool in_warp = false) {
  running->waits_in = what;
  for (unsigned turn = 0;; ++turn) {
    yield(in_warp && turn < 2);  // whoever is missing may wait for another warp
    if (done()) break;
    if (++num_idle_turns > 8 * num_alive + 64) deadlock();
  }
  num_idle_turns = 0;
  running->waits_in = nullptr;
}

// ---- the block's barrier -------------------------------------------------------------------------
static inline void open_barrier() {
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.votes[barrier.generation & 1] = 0;
}

static inline int meet_block(int vote, const char* what, int line) {
  if (!barrier.arrived) barrier.line = line;
  else if (barrier.line != line)
    fail("divergent barrier: this thread is at line %d, others wait at line %d", line, barrier.line);
  const unsigned mine = barrier.generation;
  barrier.votes[mine & 1] += vote;
  if (++barrier.arrived == num_alive) open_barrier();
  else wait_until([mine] { return barrier.generation != mine; }, what);
  return barrier.votes[mine & 1];
}

// ---- meetings of a warp ----------------------------------------------------------------------------
// Every live lane of `mask` brings a value; the last one runs `work` on the 32 values for all of them.
template <class Work>
static inline const uint64_t* meet_warp(unsigned mask, int operation, const char* what, uint64_t value, Work work) {
  Warp& w = *running->warp;
  const unsigned lane = running->lane;
  if (!(mask >> lane & 1)) fail("%s: the mask %08x lacks the calling lane %u", what, mask, lane);
  if (mask & ~w.alive) fail("%s: the mask %08x names lanes that have returned (%08x are left)", what, mask, w.alive);
  int i = 0;
  while (i < w.num_meetings && w.meetings[i].mask != mask) ++i;
  if (i == w.num_meetings) {
    if (i == (int)MAX_MASKS) fail("%s: more than %u different masks in one warp", what, MAX_MASKS);
    w.meetings[i] = Meeting{};
    w.meetings[i].mask = mask;
    ++w.num_meetings;
  }
  Meeting& m = w.meetings[i];
  const unsigned mine = m.generation;
  if (!m.arrived) m.operation = operation;
  else if (m.operation != operation) fail("%s: other lanes of the mask are in another warp operation", what);
  m.values[mine & 1][lane] = value;
  m.arrived |= 1u << lane;
  if (m.arrived == mask) {
    work(m.values[mine & 1]);
    m.arrived = 0;
    ++m.generation;
  } else {
    wait_until([&m, mine] { return m.generation != mine; }, what, true);
  }
  return m.values[mine & 1];
}
static inline void no_work(uint64_t*) {}

// ---- asynchronous copies: the data come with the wait, until then the target holds poison ---------
static inline void copy_async(void* to, const void* from, unsigned bytes, unsigned read_bytes) {
  Fiber& f = *running;
  if (((uintptr_t)to | (uintptr_t)from) & (bytes - 1)) fail("cp.async of %u bytes is misaligned", bytes);
  if (f.num_copies == (int)MAX_COPIES) fail("more than %u cp.async copies in flight in one thread", MAX_COPIES);
  memset(to, 0xFF, bytes);
  f.copies[f.num_copies++] = {(char*)to, (const char*)from, bytes, read_bytes, f.group};
}
static inline void commit_copies() { ++running->group; }
static inline void wait_copies(int num_left) {
  Fiber& f = *running;
  int kept = 0;
  for (int i = 0; i < f.num_copies; ++i) {
    Copy& c = f.copies[i];
    if (c.group >= f.group - num_left) { f.copies[kept++] = c; continue; }
    memcpy(c.to, c.from, c.read_bytes);
    memset(c.to + c.read_bytes, 0, c.bytes - c.read_bytes);
  }
  f.num_copies = kept;
}

// ---- a thread's life -------------------------------------------------------------------------------
static void end_thread() {
  Fiber* me = running;
  Warp& w = *me->warp;
  if (me->num_copies) fail("the thread ends with cp.async copies it never waited for");
  w.alive &= ~(1u << me->lane);
  --num_alive;
  num_idle_turns = 0;
  if (num_alive && barrier.arrived == num_alive) open_barrier();
  for (int i = 0; i < w.num_meetings; ++i) {
    Meeting& m = w.meetings[i];
    if (m.arrived && m.mask >> me->lane & 1) fail("returns while other lanes wait for it in a warp operation");
  }
  me->previous->next = me->next;
  me->next->previous = me->previous;
  if (!num_alive) leave_block();
  Context dead;
  running = me->next;
  emulator_switch(&dead, &running->context);
  abort();
}

static void begin_thread() {
  kernel_body(kernel_arguments);
  end_thread();
}

static void start_fiber(Fiber& f, unsigned i) {
  char* base = stacks + (size_t)i * STACK_BYTES;
  *(uint64_t*)base = STACK_GUARD;
#if defined(__x86_64__) && !defined(EMULATOR_PORTABLE)
  uint64_t* top = (uint64_t*)((uintptr_t)(base + STACK_BYTES - 64) & ~(uintptr_t)63);
  *--top = 0;  // keeps the stack aligned as after a call
  *--top = (uint64_t)&begin_thread;
  for (int saved = 0; saved < 6; ++saved) *--top = 0;
  f.context = top;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = base + 64;
  f.context.uc_stack.ss_size = STACK_BYTES - 128;
  f.context.uc_link = nullptr;
  makecontext(&f.context, begin_thread, 0);
#endif
}

// ---- launching ---------------------------------------------------------------------------------------
static struct sigaction outer_handlers[2];
static void on_bad_access(int signal, siginfo_t* info, void*) {
  if (in_kernel) fail("illegal memory access at %p", info->si_addr);
  sigaction(signal, &outer_handlers[signal == SIGBUS], nullptr);
}

static void shuffle(unsigned* order, unsigned n, uint64_t seed) {
  for (unsigned i = 0; i < n; ++i) order[i] = thread_order == 1 ? n - 1 - i : i;
  if (thread_order < 2) return;
  uint64_t s = (seed + thread_order) * 0x9E3779B97F4A7C15ULL;
  for (unsigned i = n; i > 1; --i) {
    s = s * 6364136223846793005ULL + 1442695040888963407ULL;
    std::swap(order[i - 1], order[(s >> 33) % i]);
  }
}

// Dynamic shared memory ends where the launch said: the array is placed against the end of the mapping.
static inline char* dynamic_memory() {
  const size_t end = (MAX_SHARED_BYTES + 4095) & ~4095u;
  return dynamic_shared + ((end - dynamic_bytes) & ~(size_t)15);
}

static void run_block(Index index) {
  block_index = index;
  num_alive = num_threads;
  num_idle_turns = 0;
  barrier = Barrier{};
  if (__start_emulator_shared)
    memset(__start_emulator_shared, 0xFF, __stop_emulator_shared - __start_emulator_shared);
  memset(dynamic_memory(), 0xFF, dynamic_bytes);
  static unsigned order[MAX_THREADS];
  shuffle(order, num_threads, index.x + 131 * index.y);
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& f = fibers[i];
    f.thread = {i, 0, 0};
    f.lane = i & 31;
    f.warp = &warps[i >> 5];
    f.waits_in = nullptr;
    f.num_copies = f.group = 0;
    if (!f.lane) {
      f.warp->alive = num_threads - i >= 32 ? ~0u : (1u << (num_threads - i)) - 1;
      f.warp->num_meetings = 0;
    }
    start_fiber(f, i);
    Fiber& turn = fibers[order[i]];
    turn.next = &fibers[order[(i + 1) % num_threads]];
    turn.previous = &fibers[order[(i + num_threads - 1) % num_threads]];
  }
  running = &fibers[order[0]];
  in_kernel = true;
  emulator_switch(&launcher, &running->context);
  in_kernel = false;
  ++num_blocks_run;
  for (unsigned i = 0; i < num_threads && !message[0]; ++i)
    if (*(uint64_t*)(stacks + (size_t)i * STACK_BYTES) != STACK_GUARD)
      snprintf(message, sizeof message, "%s: a thread's stack overflowed", kernel_name);
}

// CuPy compiles with -ftz=true: numbers below float32's normal ones are zeros, as operands and as results. Where the
// processor cannot be told so they are kept.
struct FlushedToZero {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  FlushedToZero() { _mm_setcsr(before | 0x8040); }
  ~FlushedToZero() { _mm_setcsr(before); }
#endif
};

static char* map_memory(size_t bytes) {
  // A page without access follows: one byte past the end is a fault.
  char* p = (char*)mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  mprotect(p + bytes, 4096, PROT_NONE);
  return p;
}

static int launch(const char* name, void (*body)(void**), const unsigned* grid, unsigned block, unsigned shared,
                  void** arguments) {
  kernel_name = name;
  kernel_body = body;
  kernel_arguments = arguments;
  message[0] = 0;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block, 1, 1};
  num_threads = block;
  const bool valid = block >= 1 && block <= MAX_THREADS && grid[0] && grid[1] && grid[2] && grid[1] <= 65535 &&
                     grid[2] <= 65535 && shared <= MAX_SHARED_BYTES;
  if (!valid) {
    snprintf(message, sizeof message, "%s: invalid launch configuration: grid (%u,%u,%u), block %u, %u bytes shared",
             name, grid[0], grid[1], grid[2], block, shared);
    return 1;
  }
  if (!stacks) {
    stacks = map_memory((MAX_THREADS * STACK_BYTES + 4095) & ~(size_t)4095);
    dynamic_shared = map_memory((MAX_SHARED_BYTES + 4095) & ~4095u);
  }
  dynamic_bytes = shared;
  // The handler never returns into the thread and needs a stack of its own: the thread's may be what is used up.
  static char handler_stack[64 * 1024];
  stack_t own{}, outer{};
  own.ss_sp = handler_stack;
  own.ss_size = sizeof handler_stack;
  sigaltstack(&own, &outer);
  struct sigaction action {};
  action.sa_sigaction = on_bad_access;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &outer_handlers[0]);
  sigaction(SIGBUS, &action, &outer_handlers[1]);
  const FlushedToZero flushed;
  const unsigned total = grid[0] * grid[1] * grid[2];
  for (unsigned k = 0; k < total && !message[0]; ++k) {
    const unsigned b = thread_order == 1 ? total - 1 - k : k;
    run_block({b % grid[0], b / grid[0] % grid[1], b / (grid[0] * grid[1])});
  }
  sigaction(SIGSEGV, &outer_handlers[0], nullptr);
  sigaction(SIGBUS, &outer_handlers[1], nullptr);
  sigaltstack(&outer, nullptr);
  return message[0] != 0;
}

}  // namespace emulator

// An emulated accelerator for torch: device memory is host memory that faults when the host touches it (mprotect),
// operators run on the CPU through views of that memory, copies that do not block are carried out as late as the rules
// of streams allow, and a vector clock checks what streams read and write. Built for PrivateUse1 ("sim") or for CUDA.
#include <torch/extension.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>
#include <sys/mman.h>
#include <cstdlib>
#include <unistd.h>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#ifdef EMU_CUDA
#define EMU_KEY CUDA
#define EMU_AUTOCAST AutocastCUDA
constexpr auto kEmu = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
#else
#define EMU_KEY PrivateUse1
#define EMU_AUTOCAST AutocastPrivateUse1
constexpr auto kEmu = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
#endif

namespace {
using at::Tensor;
using Clock = std::map<int64_t, uint64_t>;
constexpr int kStreams = 4096;

int g_devices = 2;
bool g_protect = true;
size_t g_limit = 0;  // bytes of each device; 0 is none
size_t g_page = 4096;
std::recursive_mutex g_lock;
py::object* g_callback = nullptr;
std::map<std::string, uint64_t> g_counts;
thread_local int t_quiet = 0;

void notify(const std::string& kind, const std::string& text) {
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    g_counts[kind]++;
  }
  if (!g_callback || t_quiet)
    return;
  py::gil_scoped_acquire gil;
  PyObject *t, *v, *b;
  PyErr_Fetch(&t, &v, &b);
  t_quiet++;
  try {
    (*g_callback)(kind, text);
  } catch (py::error_already_set& e) {
    t_quiet--;
    throw;
  }
  t_quiet--;
  PyErr_Restore(t, v, b);
}

// ------------------------------------------------------------------------------------------------- streams
struct Pending {
  uint64_t number;
  bool to_device;
  std::function<void()> run;
  Clock needs;
};

struct StreamState {
  uint64_t count = 0;
  Clock seen;
  std::deque<Pending> queue;
};

std::map<int64_t, StreamState> g_streams;
Clock g_host;                                             // what the host has waited for
std::vector<std::pair<std::string, std::string>> g_late;  // to notify once the lock is free
std::atomic<int64_t> g_next_stream{1};

int64_t key_of(int device, int64_t id) {
  return int64_t(device) * kStreams + id;
}

int64_t key_of(const c10::Stream& s) {
  return key_of(s.device_index(), s.id());
}

void merge(Clock& into, const Clock& other) {
  for (auto& [k, v] : other) {
    auto& x = into[k];
    if (v > x)
      x = v;
  }
}

void flush_late() {
  std::vector<std::pair<std::string, std::string>> own;
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    own.swap(g_late);
  }
  for (auto& [k, t] : own)
    notify(k, t);
}

void violation(const std::string& text) {
  g_late.emplace_back("violation", text);
}

// Run what is pending on a stream up to a number, with what it waits for first.
void drain(int64_t key, uint64_t number) {
  auto& s = g_streams[key];
  while (!s.queue.empty() && s.queue.front().number <= number) {
    Pending p = std::move(s.queue.front());
    s.queue.pop_front();
    for (auto& [k, v] : p.needs)
      if (k != key)
        drain(k, v);
    p.run();
  }
}

void drain_clock(const Clock& c) {
  for (auto& [k, v] : c)
    drain(k, v);
}

struct Watch {
  void* ptr;
  size_t size;
  uint64_t sum;
  int64_t stream;
  uint64_t number;
};

std::vector<Watch> g_watches;

uint64_t checksum(const void* p, size_t n) {
  const unsigned char* c = (const unsigned char*)p;
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < n; i++) {
    h ^= c[i];
    h *= 1099511628211ull;
  }
  return h;
}

void check_watches(const Clock* done) {
  std::vector<Watch> kept;
  for (auto& w : g_watches) {
    bool is_done = done && done->count(w.stream) && done->at(w.stream) >= w.number;
    if (checksum(w.ptr, w.size) != w.sum)
      violation("host wrote to pinned memory (" + std::to_string(w.size) +
                " bytes) of which a non-blocking copy to the device may not be complete");
    else if (!is_done)
      kept.push_back(w);
  }
  g_watches.swap(kept);
}

void host_waits(const Clock& clock) {  // The host has waited for all of it.
  drain_clock(clock);
  check_watches(&clock);
  merge(g_host, clock);
}

thread_local int t_device = 0;
thread_local std::map<int, int64_t> t_stream;

int64_t current_key(int device) {
  auto it = t_stream.find(device);
  return key_of(device, it == t_stream.end() ? 0 : it->second);
}

// ------------------------------------------------------------------------------------------------- memory
struct Block {
  char* base;
  size_t mapped, size;
  int device;
  int opens = 0;
  bool stays_open = false;
  int64_t stream;
  std::pair<int64_t, uint64_t> write{-1, 0};
  Clock uses;
  std::set<int64_t> recorded;
};

std::map<char*, Block*> g_blocks;
std::map<int, c10::CachingDeviceAllocator::DeviceStats> g_stats;

Block* find_block(const void* p) {
  auto it = g_blocks.upper_bound((char*)p);
  if (it == g_blocks.begin())
    return nullptr;
  --it;
  return (char*)p < it->second->base + it->second->mapped ? it->second : nullptr;
}

void protect(Block* b, bool open) {
  if (g_protect)
    mprotect(b->base, b->mapped, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

struct Opened {  // Device memory that may be read and written meanwhile.
  std::vector<Block*> held;

  void add(const void* p) {
    if (!p)
      return;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    Block* b = find_block(p);
    TORCH_INTERNAL_ASSERT(b, "emu: no such device memory");
    if (b->opens++ == 0)
      protect(b, true);
    held.push_back(b);
  }

  ~Opened() {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    for (auto* b : held)
      if (--b->opens == 0 && !b->stays_open)
        protect(b, false);
  }
};

bool ordered(int64_t mine, int64_t other, uint64_t count) {
  if (other < 0 || mine == other)
    return true;
  auto it = g_host.find(other);
  if (it != g_host.end() && it->second >= count)
    return true;
  auto& seen = g_streams[mine].seen;
  auto jt = seen.find(other);
  return jt != seen.end() && jt->second >= count;
}

std::string at_stream(int64_t k) {
  return "stream " + std::to_string(k % kStreams) + " of device " + std::to_string(k / kStreams);
}

void touch(Block* b, int64_t stream, uint64_t number, bool writes, const char* what) {
  if (!ordered(stream, b->write.first, b->write.second))
    violation(std::string(what) + " on " + at_stream(stream) + " touches memory (" + std::to_string(b->size) +
              " bytes) that " + at_stream(b->write.first) + " has written, without waiting for it");
  if (writes) {
    for (auto& [s, c] : b->uses)
      if (!ordered(stream, s, c))
        violation(std::string(what) + " on " + at_stream(stream) + " writes memory that " + at_stream(s) +
                  " may still use");
    b->write = {stream, number};
  }
  b->uses[stream] = number;
}

// An operation on the current stream of a device: what is pending for it comes first.
std::pair<int64_t, uint64_t> launch(int device) {
  int64_t key = current_key(device);
  auto& s = g_streams[key];
  drain_clock(s.seen);
  uint64_t last = 0;
  for (auto& p : s.queue)
    if (p.to_device)
      last = p.number;
  if (last)
    drain(key, last);
  return {key, ++s.count};
}

void host_waits_for_stream(int device) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  int64_t key = current_key(device);
  Clock c = g_streams[key].seen;
  c[key] = g_streams[key].count;
  host_waits(c);
}

struct EmuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(kEmu, t_device);
    if (n == 0)
      return {nullptr, nullptr, &free_block, device};
    std::unique_lock<std::recursive_mutex> hold(g_lock);
    auto& stats = g_stats[t_device];
    if (g_limit && stats.allocated_bytes[0].current + n > g_limit) {
      stats.num_ooms++;
      size_t used = stats.allocated_bytes[0].current;
      hold.unlock();
      std::ostringstream text;
#ifdef EMU_CUDA
      text << "CUDA out of memory. ";
#else
      text << "sim out of memory. ";
#endif
      text << "Tried to allocate " << n / 1048576.0 << " MiB. Device " << t_device << " has a total capacity of "
           << g_limit / 1048576.0 << " MiB of which " << (g_limit - used) / 1048576.0 << " MiB is free.";
      TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
    }
    size_t mapped = (n + g_page - 1) / g_page * g_page;
    char* p = (char*)mmap(nullptr, mapped, g_protect ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "emu: mmap failed");
    auto* b = new Block{p, mapped, n, t_device};
    b->stream = current_key(t_device);
    if (g_protect) {
      protect(b, true);
    }
    memset(p, 0xA5, n);  // Fresh device memory holds garbage.
    if (g_protect) {
      protect(b, false);
    }
    g_blocks[p] = b;
    stats.allocated_bytes[0].increase(n);
    stats.reserved_bytes[0].increase(n);
    stats.active_bytes[0].increase(n);
    stats.allocation[0].increase(1);
    return {p, p, &free_block, device};
  }

  static void free_block(void* p) {
    if (!p)
      return;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto it = g_blocks.find((char*)p);
    if (it == g_blocks.end())
      return;
    Block* b = it->second;
    for (auto& [s, c] : b->uses)
      if (s != b->stream && !b->recorded.count(s) && !ordered(b->stream, s, c))
        violation("memory (" + std::to_string(b->size) + " bytes) of " + at_stream(b->stream) + " was freed while " +
                  at_stream(s) + " may still use it: no record_stream, and nothing waits");
    auto& stats = g_stats[b->device];
    stats.allocated_bytes[0].decrease(b->size);
    stats.reserved_bytes[0].decrease(b->size);
    stats.active_bytes[0].decrease(b->size);
    stats.allocation[0].decrease(1);
    // What is pending into or out of it: the real allocator would wait. Here it is done at once.
    for (auto& [k, s] : g_streams)
      drain(k, s.count);
    munmap(b->base, b->mapped);
    g_blocks.erase(it);
    delete b;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    Opened o;
    o.add(dest);
    o.add(src);
    memcpy(dest, src, count);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    g_counts["empty_cache"]++;
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream s) override {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    if (Block* b = find_block(ptr.get()))
      b->recorded.insert(key_of(s));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return g_stats[d];
  }

  void resetAccumulatedStats(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    g_stats[d].allocated_bytes[0].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    g_stats[d].allocated_bytes[0].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    size_t total = g_limit ? g_limit : size_t(8) << 30, used = g_stats[d].allocated_bytes[0].current;
    return {total - std::min(total, used), total};
  }
};

EmuAllocator g_allocator;

std::map<char*, size_t> g_pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    char* p = n ? (char*)aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (p) {
      std::lock_guard<std::recursive_mutex> h(g_lock);
      g_pinned[p] = n;
      memset(p, 0x5A, n);
      g_counts["pinned_bytes"] += n;
    }
    return {p, p, &release, c10::Device(c10::kCPU)};
  }

  static void release(void* p) {
    if (!p)
      return;
    std::lock_guard<std::recursive_mutex> h(g_lock);
    auto it = g_pinned.find((char*)p);
    // The real allocator does not reuse it before the copies are complete.
    std::vector<Watch> kept;
    for (auto& w : g_watches)
      if (!((char*)w.ptr >= (char*)p && (char*)w.ptr < (char*)p + it->second))
        kept.push_back(w);
      else if (checksum(w.ptr, w.size) != w.sum)
        violation("host wrote to pinned memory (" + std::to_string(w.size) +
                  " bytes) of which a non-blocking copy to the device may not be complete");
    g_watches.swap(kept);
    g_counts["pinned_bytes"] -= it->second;
    g_pinned.erase(it);
    free(p);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};

PinnedAllocator g_pinned_allocator;

bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> h(g_lock);
  auto it = g_pinned.upper_bound((char*)p);
  if (it == g_pinned.begin())
    return false;
  --it;
  return (char*)p < it->first + it->second;
}

// ------------------------------------------------------------------------------------------------- generators
struct EmuGenerator final : at::CPUGeneratorImpl {
  explicit EmuGenerator(int device) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kEmu, device);
    key_set_ = c10::DispatchKeySet(kKey);
  }
};

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < 16; i++)
      all.push_back(at::make_generator<EmuGenerator>(i));
    return all;
  }();
  return made.at(device < 0 ? t_device : device);
}

// ------------------------------------------------------------------------------------------------- device guard
struct Event {
  int64_t stream;
  uint64_t number;
  Clock clock;
  double when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmu; }

  c10::Device exchangeDevice(c10::Device d) const override {
    int old = t_device;
    setDevice(d);
    return {kEmu, (c10::DeviceIndex)old};
  }

  c10::Device getDevice() const override { return {kEmu, (c10::DeviceIndex)t_device}; }

  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < g_devices, "emu: invalid device ordinal ", (int)d.index());
    if (d.index() >= 0)
      t_device = d.index();
  }

  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0)
      t_device = d.index();
  }

  c10::Stream getStream(c10::Device d) const override {
    int i = d.index() < 0 ? t_device : d.index();
    auto it = t_stream.find(i);
    return c10::Stream(c10::Stream::UNSAFE, {kEmu, (c10::DeviceIndex)i}, it == t_stream.end() ? 0 : it->second);
  }

  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }

  c10::Stream getNewStream(c10::Device d, int) const override {
    int i = d.index() < 0 ? t_device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kEmu, (c10::DeviceIndex)i}, g_next_stream++);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }

  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    t_stream[s.device_index()] = s.id();
    return old;
  }

  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }

  c10::DeviceIndex deviceCount() const noexcept override { return g_devices; }

  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }

  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    if (!*e)
      *e = new Event;
    auto* ev = (Event*)*e;
    int64_t k = key_of(s);
    ev->stream = k;
    ev->number = g_streams[k].count;
    ev->clock = g_streams[k].seen;
    ev->clock[k] = ev->number;
    ev->when = double(std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::steady_clock::now().time_since_epoch())
                          .count()) /
               1000;
  }

  void block(void* e, const c10::Stream& s) const override {
    if (!e)
      return;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    merge(g_streams[key_of(s)].seen, ((Event*)e)->clock);
  }

  bool queryEvent(void* e) const override {
    if (!e)
      return true;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto* ev = (Event*)e;
    auto it = g_host.find(ev->stream);
    if (it != g_host.end() && it->second >= ev->number)
      return true;
    host_waits(ev->clock);  // It has taken long enough.
    return false;
  }

  bool queryStream(const c10::Stream&) const override { return true; }

  void synchronizeStream(const c10::Stream& s) const override {
    {
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      Clock c = g_streams[key_of(s)].seen;
      c[key_of(s)] = g_streams[key_of(s)].count;
      host_waits(c);
    }
    flush_late();
    notify("sync", "stream.synchronize");
  }

  void synchronizeEvent(void* e) const override {
    if (e) {
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      host_waits(((Event*)e)->clock);
    }
    flush_late();
    notify("sync", "event.synchronize");
  }

  void synchronizeDevice(const c10::DeviceIndex d) const override {
    {
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      Clock c;
      for (auto& [k, s] : g_streams)
        if (k / kStreams == (d < 0 ? t_device : d)) {
          merge(c, s.seen);
          c[k] = s.count;
        }
      host_waits(c);
    }
    flush_late();
    notify("sync", "device.synchronize");
  }

  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    g_allocator.recordStream(p, s);
  }

  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return ((Event*)b)->when - ((Event*)a)->when;
  }
};

// ------------------------------------------------------------------------------------------------- hooks
#ifdef EMU_CUDA
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs = {}) {}

  bool hasCUDA() const override { return true; }

  bool hasCUDART() const override { return true; }

  int getNumGPUs() const override { return g_devices; }

  c10::DeviceIndex current_device() const override { return t_device; }

  c10::Allocator* getCUDADeviceAllocator() const override { return &g_allocator; }

  void deviceSynchronize(c10::DeviceIndex d) const override { Guard().synchronizeDevice(d); }

  std::string showConfig() const override { return "emulated CUDA"; }
#else
struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* s = storage.unsafeGetStorageImpl();
    c10::impl::VirtualGuardImpl g(kEmu);
    auto old = g.exchangeDevice(storage.device());
    auto made = g_allocator.allocate(n);
    if (n && s->nbytes())
      g_allocator.copy_data(made.get(), s->data(), std::min(n, (size_t)s->nbytes()));
    g.setDevice(old);
    s->set_data_ptr_noswap(std::move(made));
    s->set_nbytes(n);
  }
#endif
  bool isBuilt() const override { return true; }

  bool isAvailable() const override { return g_devices > 0; }

  void init() const override {}

  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return g_devices; }

  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice({kEmu, d}); }

  c10::DeviceIndex getCurrentDevice() const override { return t_device; }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice({kEmu, d}).index();
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice({kEmu, d}).index();
  }

  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }

  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }

  c10::Device getDeviceFromPtr(void* p) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    Block* b = find_block(p);
    return {kEmu, (c10::DeviceIndex)(b ? b->device : 0)};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }

  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<EmuGenerator>(d < 0 ? t_device : d);
  }
};

// ------------------------------------------------------------------------------------------------- operators
bool is_emu(const Tensor& t) {
  return t.defined() && t.device().type() == kEmu;
}

struct Aliases {  // The CPU's views of device tensors during one operation.
  Opened opened;
  std::map<c10::StorageImpl*, c10::Storage> to_cpu;
  std::map<c10::StorageImpl*, std::pair<c10::Storage, void*>> from_cpu;
  std::map<at::TensorImpl*, Tensor> origin;
  std::vector<Tensor> kept;
  int device = -1;

  Tensor alias(const Tensor& t) {
    if (device < 0)
      device = t.device().index();
    const c10::Storage& s = t.storage();
    auto it = to_cpu.find(s.unsafeGetStorageImpl());
    if (it == to_cpu.end()) {
      void* p = s.unsafeGetStorageImpl()->mutable_data();
      opened.add(p);
      c10::Storage made(c10::Storage::use_byte_size_t(), s.nbytes(), c10::DataPtr(p, c10::Device(c10::kCPU)),
                        c10::GetCPUAllocator(), true);
      from_cpu.emplace(made.unsafeGetStorageImpl(), std::make_pair(s, p));
      it = to_cpu.emplace(s.unsafeGetStorageImpl(), made).first;
    }
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(it->second),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj())
      view._set_conj(true);
    if (t.is_neg())
      view._set_neg(true);
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    origin[view.unsafeGetTensorImpl()] = t;
    kept.push_back(view);
    return view;
  }
};

Tensor empty_like_on(int device, const Tensor& cpu) {
  c10::impl::VirtualGuardImpl g(kEmu);
  auto old = g.exchangeDevice({kEmu, (c10::DeviceIndex)device});
  Tensor made = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &g_allocator, c10::DispatchKeySet(kKey),
                                                  cpu.scalar_type());
  g.setDevice(old);
  return made;
}

const std::set<std::string>& data_dependent() {
  static const std::set<std::string> names{"aten::nonzero",
                                           "aten::masked_select",
                                           "aten::_unique2",
                                           "aten::unique_dim",
                                           "aten::unique_consecutive",
                                           "aten::repeat_interleave",
                                           "aten::bincount",
                                           "aten::equal",
                                           "aten::_unique",
                                           "aten::unique_dim_consecutive",
                                           "aten::nonzero_static_",
                                           "aten::is_nonzero"};
  return names;
}

const std::set<std::string>& may_mix() {
  static const std::set<std::string> names{"aten::index",         "aten::index_put_",    "aten::_index_put_impl_",
                                           "aten::_copy_from",    "aten::copy_",         "aten::set_",
                                           "aten::_foreach_add_", "aten::_foreach_mul_", "aten::_foreach_div_"};
  return names;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& args = schema.arguments();
  const size_t n = args.size(), begin = stack->size() - n;
  const std::string& name = schema.operator_name().name;
  Aliases al;
  bool mixes_cpu = false;
  std::string where;
  std::optional<c10::Device> asked;
  std::vector<std::pair<Tensor, bool>> touched;  // tensor, is written
  auto look = [&](const Tensor& t, bool writes) {
    if (!t.defined())
      return;
    if (is_emu(t)) {
      TORCH_CHECK(al.device < 0 || al.device == t.device().index(),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  c10::Device(kEmu, al.device), " and ", t.device(), "! (in ", name, ")");
      al.device = t.device().index();
      touched.emplace_back(t, writes);
    } else if (t.device().is_cpu() && t.dim() > 0 && !may_mix().count(name)) {
      mixes_cpu = true;
      where = c10::str(t.sizes());
    }
  };
  for (size_t i = 0; i < n; i++) {
    const auto& v = (*stack)[begin + i];
    const bool writes = args[i].alias_info() && args[i].alias_info()->isWrite();
    if (v.isTensor())
      look(v.toTensor(), writes);
    else if (v.isTensorList())
      for (const Tensor& t : v.toTensorVector()) {
        look(t, writes);
        if (writes && name.rfind("aten::_foreach_", 0) == 0 && !t.is_inference())
          t.unsafeGetTensorImpl()->bump_version();  // As CUDA's kernels do, in torch's ForeachFunctors.cuh.
      }
    else if (v.isList()) {
      for (const auto& e : v.toListRef())
        if (e.isTensor())
          look(e.toTensor(), writes);
    } else if (v.isDevice())
      asked = v.toDevice();
  }
  if (al.device < 0 && asked)
    al.device = asked->index() < 0 ? t_device : asked->index();
  if (al.device < 0)
    al.device = t_device;
  static const bool lenient = getenv("ZAE_EMULATED_LENIENT") != nullptr;
  if (lenient && mixes_cpu && !touched.empty()) {
    notify("mix", name + " with a host tensor of sizes " + where);
    mixes_cpu = false;
  }
  TORCH_CHECK(!mixes_cpu || touched.empty(),
              "Expected all tensors to be on the same device, but got a tensor of sizes ", where,
              " on cpu, different from other tensors on ", c10::Device(kEmu, al.device),
              " (when checking argument in method ", name, ")");
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto [stream, number] = launch(al.device);
    for (auto& [t, writes] : touched)
      if (void* p = t.storage().unsafeGetStorageImpl()->mutable_data())
        if (Block* b = find_block(p))
          touch(b, stream, number, writes, name.c_str());
    g_counts["launch"]++;
  }
  flush_late();
  if (data_dependent().count(name)) {
    host_waits_for_stream(al.device);
    notify("sync", name);
  }
  // Arguments as the CPU sees them.
  std::vector<c10::IValue> original(stack->end() - n, stack->end());
  bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  at::Generator device_gen, cpu_gen;
  int gen_arg = -1;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) {
      if (is_emu(v.toTensor()))
        v = al.alias(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : v.toTensorVector())
        made.push_back(is_emu(t) ? al.alias(t) : t);
      v = made;
    } else if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      auto list = v.toList();
      if (list.elementType()->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<std::optional<Tensor>> made;
        for (const auto& e : v.toListRef()) {
          if (e.isTensor()) {
            Tensor t = e.toTensor();
            if (is_emu(t) && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) {
              host_waits_for_stream(al.device);
              notify("sync", name + " with a mask");
            }
            made.push_back(is_emu(t) ? al.alias(t) : t);
          } else
            made.push_back(std::nullopt);
        }
        v = made;
      }
    } else if (v.isDevice()) {
      if (v.toDevice().type() == kEmu)
        v = c10::Device(c10::kCPU);
    } else if (args[i].type()->str() == "Generator?" || args[i].type()->str() == "Generator") {
      gen_arg = (int)i;
      if (!v.isNone())
        device_gen = v.toGenerator();
    }
  }
  if (is_random) {
    if (!device_gen.defined())
      device_gen = default_generator(al.device);
    TORCH_CHECK(device_gen.device().type() == kEmu, "Expected a '", c10::DeviceTypeName(kEmu, true),
                "' device type for generator but found '", device_gen.device().type(), "'");
  }
  if (gen_arg >= 0)
    (*stack)[begin + gen_arg] = c10::IValue();
  if (is_random) {
    static std::mutex random_lock;
    std::lock_guard<std::mutex> hold(random_lock);
    const at::Generator& cpu = at::detail::getDefaultCPUGenerator();
    Tensor saved = cpu.get_state();
    at::Generator own = cpu;
    own.set_state(device_gen.get_state());
    std::exception_ptr error;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (...) {
      error = std::current_exception();
    }
    device_gen.set_state(cpu.get_state());
    own.set_state(saved);
    if (error)
      std::rethrow_exception(error);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  // What was resized (out=...): copy it into the device tensor.
  for (auto& [impl, t] : al.origin) {
    auto it = al.from_cpu.find(impl->storage().unsafeGetStorageImpl());
    bool moved = it == al.from_cpu.end() || impl->storage().unsafeGetStorageImpl()->data() != it->second.second;
    if (moved || impl->sizes() != t.sizes() || impl->strides() != t.strides()) {
      if (moved) {
        Tensor made = empty_like_on(
            al.device, Tensor(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(impl)));
        Opened o;
        o.add(made.storage().unsafeGetStorageImpl()->mutable_data());
        memcpy(made.storage().unsafeGetStorageImpl()->mutable_data(), impl->storage().data(),
               std::min(made.storage().nbytes(), impl->storage().nbytes()));
        t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr());
        t.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      }
      t.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(),
                                                     moved ? 0 : impl->storage_offset());
    }
  }
  // Results: the arguments themselves, views of them, or new tensors.
  const auto& rets = schema.returns();
  const size_t rbegin = stack->size() - rets.size();
  auto convert = [&](const Tensor& r) -> Tensor {
    if (!r.defined() || !r.device().is_cpu())
      return r;
    auto it = al.origin.find(r.unsafeGetTensorImpl());
    if (it != al.origin.end())
      return it->second;
    if (r.layout() != c10::kStrided)
      TORCH_CHECK(false, "emu: ", name, " returns a tensor that is not strided");
    auto jt = r.has_storage() ? al.from_cpu.find(r.storage().unsafeGetStorageImpl()) : al.from_cpu.end();
    if (jt != al.from_cpu.end()) {
      Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(jt->second.first),
                                                             c10::DispatchKeySet(kKey), r.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides(), r.storage_offset());
      return view;
    }
    Tensor made = empty_like_on(al.device, r);
    if (r.numel()) {
      Aliases back;
      Tensor target = back.alias(made);
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      at::native::copy_(target, r, false);
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      if (Block* b = find_block(made.storage().unsafeGetStorageImpl()->mutable_data())) {
        int64_t k = current_key(al.device);
        touch(b, k, g_streams[k].count, true, name.c_str());
      }
    }
    if (r.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  };
  bool has_device_arg = !al.origin.empty() || (asked && asked->type() == kEmu);
  if (!has_device_arg)
    return;
  for (size_t i = 0; i < rets.size(); i++) {
    auto& v = (*stack)[rbegin + i];
    if (v.isTensor())
      v = convert(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : v.toTensorVector())
        made.push_back(convert(t));
      v = made;
    }
  }
}

Tensor emu_empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::impl::VirtualGuardImpl g(kEmu);
  auto d = device.value_or(c10::Device(kEmu, t_device));
  auto old = g.exchangeDevice(d);
  try {
    auto made =
        at::detail::empty_generic(size, &g_allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
    g.setDevice(old);
    return made;
  } catch (...) {
    g.setDevice(old);
    throw;
  }
}

Tensor emu_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::impl::VirtualGuardImpl g(kEmu);
  auto d = device.value_or(c10::Device(kEmu, t_device));
  auto old = g.exchangeDevice(d);
  try {
    auto made = at::detail::empty_strided_generic(size, stride, &g_allocator, c10::DispatchKeySet(kKey),
                                                  c10::dtype_or_default(dtype));
    g.setDevice(old);
    return made;
  } catch (...) {
    g.setDevice(old);
    throw;
  }
}

const Tensor& emu_resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = (c10::multiply_integers(size) + impl->storage_offset()) * self.element_size();
  auto* s = self.storage().unsafeGetStorageImpl();
  if (needed > s->nbytes()) {
    c10::impl::VirtualGuardImpl g(kEmu);
    auto old = g.exchangeDevice(self.device());
    auto made = g_allocator.allocate(needed);
    if (s->nbytes())
      g_allocator.copy_data(made.get(), s->data(), s->nbytes());
    g.setDevice(old);
    s->set_data_ptr_noswap(std::move(made));
    s->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  if (format.has_value())
    impl->empty_tensor_restride(*format);
  return self;
}

Tensor& emu_set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else
    impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& emu_set_source(Tensor& self, c10::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return emu_set_storage(self, source, 0, {n}, {});
}

Tensor& emu_set_tensor(Tensor& self, const Tensor& other) {
  if (self.is_same(other))
    return self;
  return emu_set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& emu_set_none(Tensor& self) {
  c10::impl::VirtualGuardImpl g(kEmu);
  auto old = g.exchangeDevice(self.device());
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, g_allocator.allocate(0), &g_allocator, true);
  g.setDevice(old);
  return emu_set_storage(self, s, 0, {0}, {});
}

Tensor emu_view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor emu_as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor emu_reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Scalar emu_local_scalar(const Tensor& self) {
  Aliases al;
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto [stream, number] = launch(self.device().index());
    if (Block* b = find_block(self.storage().unsafeGetStorageImpl()->mutable_data()))
      touch(b, stream, number, false, "item");
  }
  host_waits_for_stream(self.device().index());
  flush_late();
  notify("sync", "item");
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  return al.alias(self).item();
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && !a.is_conj() && !a.is_neg() && !b.is_conj() && !b.is_neg();
}

Tensor& emu_copy(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || !self.numel())
    return self;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset |
                                                 c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  const bool to = is_emu(self), from = is_emu(src);
  Tensor source = src.sizes() == self.sizes() ? src : src.expand(self.sizes());
  if (to && from) {
    Aliases a;
    {
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      auto [s1, n1] = launch(src.device().index());
      if (Block* b = find_block(src.storage().unsafeGetStorageImpl()->mutable_data()))
        touch(b, s1, n1, false, "copy_");
      auto [s2, n2] = launch(self.device().index());
      if (s1 != s2) {
        merge(g_streams[s2].seen, g_streams[s1].seen);
        g_streams[s2].seen[s1] = n1;
        merge(g_streams[s1].seen, g_streams[s2].seen);
        g_streams[s1].seen[s2] = n2;
      }
      if (Block* b = find_block(self.storage().unsafeGetStorageImpl()->mutable_data()))
        touch(b, s2, n2, true, "copy_");
      g_counts["launch"]++;
    }
    flush_late();
    Tensor target = a.alias(self);
    Aliases other;
    Tensor origin = source.device() == self.device() ? a.alias(source) : other.alias(source);
    at::native::copy_(target, origin, false);
    return self;
  }
  const Tensor& dev = to ? self : source;
  const Tensor& host = to ? source : self;
  const bool pinned = is_pinned(host.storage().data());
  const int device = dev.device().index();
  void* base = dev.storage().unsafeGetStorageImpl()->mutable_data();
  int64_t stream;
  uint64_t number;
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    if (to) {
      stream = current_key(device);
      drain_clock(Clock{});
      number = ++g_streams[stream].count;
    } else
      std::tie(stream, number) = launch(device);
    if (Block* b = find_block(base))
      touch(b, stream, number, to, to ? "copy to the device" : "copy to the host");
    g_counts["launch"]++;
    g_counts[to ? "h2d" : "d2h"]++;
    if (!pinned)
      g_counts[to ? "h2d_pageable" : "d2h_pageable"]++;
  }
  flush_late();
  if (non_blocking && pinned && same_layout(self, source)) {
    size_t bytes = dev.numel() * dev.element_size();
    char* at_host = (char*)host.mutable_data_ptr();
    char* at_dev = (char*)base + dev.storage_offset() * dev.element_size();
    c10::Storage keep_host = host.storage();
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto& s = g_streams[stream];
    Clock needs = s.seen;
    if (to) {
      uint64_t sum = checksum(at_host, bytes);
      g_watches.push_back({at_host, bytes, sum, stream, number});
      s.queue.push_back({number, true,
                         [=] {
                           if (checksum(at_host, bytes) != sum)
                             violation("host wrote to pinned memory (" + std::to_string(bytes) +
                                       " bytes) before a non-blocking copy to the device was complete");
                           if (Block* b = find_block(at_dev)) {
                             if (b->opens++ == 0)
                               protect(b, true);
                             memcpy(at_dev, at_host, bytes);
                             if (--b->opens == 0 && !b->stays_open)
                               protect(b, false);
                           }
                           (void)keep_host;
                         },
                         needs});
    } else {
      auto bytes_now = std::make_shared<std::vector<char>>(bytes);
      {
        Opened o;
        o.add(base);
        memcpy(bytes_now->data(), at_dev, bytes);
      }
      memset(at_host, 0xCB, bytes);  // Nobody may read it yet.
      s.queue.push_back({number, false,
                         [=] {
                           memcpy(at_host, bytes_now->data(), bytes);
                           (void)keep_host;
                         },
                         needs});
    }
    g_counts[to ? "h2d_async" : "d2h_async"]++;
    return self;
  }
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    launch(device);
  }
  Aliases a;
  Tensor near = a.alias(dev);
  if (to)
    at::native::copy_(near, source, false);
  else {
    Tensor target = self;
    at::native::copy_(target, near, false);
  }
  if (!non_blocking || !to) {
    host_waits_for_stream(device);
    flush_late();
    notify("sync", std::string(to ? "copy to the device" : "copy to the host") +
                       (non_blocking ? " (not blocking, but pageable)" : " (blocking)"));
  }
  return self;
}

void emu_record_stream(Tensor& self, c10::Stream s) {
  g_allocator.recordStream(self.storage().data_ptr(), s);
}

bool emu_is_pinned(const Tensor&, std::optional<at::Device>) {
  return false;
}

#ifdef EMU_CUDA
bool sdp_math(sdp::sdp_params const&) {
  return true;
}
#endif
int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

int64_t fused_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& m, double p,
                     bool c, std::optional<double> s, bool g) {
  return choose_math(q, k, v, m, p, c, s, g);
}

Tensor fresh(int device, const Tensor& r) {
  if (!r.defined())
    return r;
  Tensor made = empty_like_on(device, r);
  if (r.numel()) {
    Aliases back;
    Tensor target = back.alias(made);
    at::native::copy_(target, r, false);
  }
  return made;
}

Tensor conv(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
            c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
            int64_t groups) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset |
                                                 c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto [k, n] = launch(input.device().index());
    g_counts["launch"]++;
    for (auto* t : {&input, &weight})
      if (Block* b = find_block(t->storage().unsafeGetStorageImpl()->mutable_data()))
        touch(b, k, n, false, "convolution");
  }
  flush_late();
  Aliases al;
  std::optional<Tensor> b;
  if (bias.has_value() && bias->defined())
    b = al.alias(*bias);
  return fresh(input.device().index(), at::convolution(al.alias(input), al.alias(weight), b, stride, padding, dilation,
                                                       transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                 c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                 c10::IntArrayRef dilation, bool transposed,
                                                 c10::IntArrayRef output_padding, int64_t groups,
                                                 std::array<bool, 3> mask) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset |
                                                 c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto [k, n] = launch(input.device().index());
    g_counts["launch"]++;
    for (auto* t : {&grad, &input, &weight})
      if (Block* b = find_block(t->storage().unsafeGetStorageImpl()->mutable_data()))
        touch(b, k, n, false, "convolution_backward");
  }
  flush_late();
  Aliases al;
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] =
      at::convolution_backward(al.alias(grad), al.alias(input), al.alias(weight), c10::IntArrayRef{channels}, stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  int d = input.device().index();
  return {mask[0] ? fresh(d, a) : Tensor(), mask[1] ? fresh(d, b) : Tensor(), mask[2] ? fresh(d, c) : Tensor()};
}

Tensor conv_plain(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                  c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
                  int64_t groups) {
  return conv(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> conv_backward_plain(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                       at::OptionalIntArrayRef, c10::IntArrayRef stride,
                                                       c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                       bool transposed, c10::IntArrayRef output_padding, int64_t groups,
                                                       std::array<bool, 3> mask) {
  return conv_backward(grad, input, weight, stride, padding, dilation, transposed, output_padding, groups, mask);
}

TORCH_LIBRARY_IMPL(_, EMU_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, EMU_KEY, m) {
  m.impl("empty.memory_format", TORCH_FN(emu_empty));
  m.impl("empty_strided", TORCH_FN(emu_empty_strided));
  m.impl("as_strided", TORCH_FN(emu_as_strided));
  m.impl("view", TORCH_FN(emu_view));
  m.impl("_reshape_alias", TORCH_FN(emu_reshape_alias));
  m.impl("resize_", TORCH_FN(emu_resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(emu_set_storage));
  m.impl("set_.source_Storage", TORCH_FN(emu_set_source));
  m.impl("set_.source_Tensor", TORCH_FN(emu_set_tensor));
  m.impl("set_", TORCH_FN(emu_set_none));
  m.impl("copy_", TORCH_FN(emu_copy));
  // One kernel for many tensors, as on CUDA: by default torch calls a kernel for each of them.
  for (const char* name : {"_foreach_add_.List", "_foreach_copy_", "_foreach_mul_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_local_scalar_dense", TORCH_FN(emu_local_scalar));
  m.impl("record_stream", TORCH_FN(emu_record_stream));
  m.impl("is_pinned", TORCH_FN(emu_is_pinned));
  m.impl("_fused_sdp_choice", TORCH_FN(fused_choice));
  m.impl("convolution_overrideable", TORCH_FN(conv));
  m.impl("convolution_backward_overrideable", TORCH_FN(conv_backward));
  m.impl("convolution", TORCH_FN(conv_plain));
  m.impl("convolution_backward", TORCH_FN(conv_backward_plain));
}

#ifndef EMU_CUDA
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define EMU_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(EMU_LOW)
#define EMU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(EMU_FP32)
}
#endif
// ------------------------------------------------------------------------------------------------- collectives
// A backend for the device that gives the CPU's views of its tensors to another one (gloo).
struct EmuCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;

  EmuCCL(c10::intrusive_ptr<c10d::Backend> i, int rank, int size) : Backend(rank, size), inner(std::move(i)) {}

  const std::string getBackendName() const override { return "emuccl"; }

  void setSequenceNumberForGroup() override { inner->setSequenceNumberForGroup(); }

  uint64_t getSequenceNumberForGroup() override { return inner->getSequenceNumberForGroup(); }

  Tensor cpu(const Tensor& t) {
    if (!is_emu(t))
      return t;
    TORCH_CHECK(t.device().index() == t_device || true, "");
    {
      std::lock_guard<std::recursive_mutex> hold(g_lock);
      launch(t.device().index());
      if (Block* b = find_block(t.storage().unsafeGetStorageImpl()->mutable_data())) {
        b->stays_open = true;
        protect(b, true);
      }
    }
    if (!t.numel())
      return at::empty(t.sizes(), t.options().device(at::kCPU));
    Tensor view =
        at::from_blob((char*)t.storage().unsafeGetStorageImpl()->mutable_data() + t.storage_offset() * t.element_size(),
                      t.sizes(), t.strides(), [t](void*) {}, at::TensorOptions().dtype(t.dtype()));
    return view;
  }

  std::vector<Tensor> cpus(const std::vector<Tensor>& v) {
    std::vector<Tensor> r;
    for (auto& t : v)
      r.push_back(cpu(t));
    return r;
  }

  std::vector<std::vector<Tensor>> cpuss(const std::vector<std::vector<Tensor>>& v) {
    std::vector<std::vector<Tensor>> r;
    for (auto& t : v)
      r.push_back(cpus(t));
    return r;
  }

  using W = c10::intrusive_ptr<c10d::Work>;

  W broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto c = cpus(t);
    return inner->broadcast(c, o);
  }

  W allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto c = cpus(t);
    return inner->allreduce(c, o);
  }

  W allreduce_coalesced(std::vector<Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto c = cpus(t);
    return inner->allreduce_coalesced(c, o);
  }

  W reduce(std::vector<Tensor>& t, const c10d::ReduceOptions& o) override {
    auto c = cpus(t);
    return inner->reduce(c, o);
  }

  W allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
              const c10d::AllgatherOptions& o) override {
    auto a = cpuss(out);
    auto b = cpus(in);
    return inner->allgather(a, b, o);
  }

  W _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return inner->_allgather_base(a, b, o);
  }

  W allgather_into_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                    const c10d::AllgatherOptions& o) override {
    auto a = cpus(out);
    auto b = cpus(in);
    return inner->allgather_into_tensor_coalesced(a, b, o);
  }

  W reduce_scatter_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                    const c10d::ReduceScatterOptions& o) override {
    auto a = cpus(out);
    auto b = cpus(in);
    return inner->reduce_scatter_tensor_coalesced(a, b, o);
  }

  W gather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in, const c10d::GatherOptions& o) override {
    auto a = cpuss(out);
    auto b = cpus(in);
    return inner->gather(a, b, o);
  }

  W scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in, const c10d::ScatterOptions& o) override {
    auto a = cpus(out);
    auto b = cpuss(in);
    return inner->scatter(a, b, o);
  }

  W _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return inner->_reduce_scatter_base(a, b, o);
  }

  W reduce_scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in,
                   const c10d::ReduceScatterOptions& o) override {
    auto a = cpus(out);
    auto b = cpuss(in);
    return inner->reduce_scatter(a, b, o);
  }

  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is,
                  const c10d::AllToAllOptions& o) override {
    auto a = cpu(out), b = cpu(in);
    return inner->alltoall_base(a, b, os, is, o);
  }

  W send(std::vector<Tensor>& t, int d, int tag) override {
    auto c = cpus(t);
    return inner->send(c, d, tag);
  }

  W recv(std::vector<Tensor>& t, int s, int tag) override {
    auto c = cpus(t);
    return inner->recv(c, s, tag);
  }

  W barrier(const c10d::BarrierOptions& o) override {
    c10d::BarrierOptions plain;
    return inner->barrier(plain);
  }
};
}  // namespace

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {
struct EmuTimer final : c10d::Timer {
  explicit EmuTimer(c10::Device) {}

  std::optional<int64_t> measureDifference(Event a, Event b) override {
    auto x = getTimeRef(a), y = getTimeRef(b);
    if (x < 0 || y < 0)
      return std::nullopt;
    return y - x;
  }
};
}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, kEmu, EmuTimer);
}
#ifdef EMU_CUDA
namespace at {
using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
#endif
namespace at::native {
#ifndef EMU_CUDA
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_math)
#endif
}  // namespace at::native

static void install(int devices, bool protect_memory, size_t limit) {
  g_devices = devices;
  g_protect = protect_memory;
  g_limit = limit;
  g_page = sysconf(_SC_PAGESIZE);
  c10::SetAllocator(kEmu, &g_allocator, 255);
  static Guard guard;
  c10::impl::registerDeviceGuard(kEmu, &guard);
#ifdef EMU_CUDA
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math);
#else
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
#endif
}

extern "C" void emu_install(int devices, int protect_memory, unsigned long limit) {
  install(devices, protect_memory, limit);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("set_limit", [](size_t n) {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    g_limit = n;
  });
  m.def("current_device", [] { return t_device; });
  m.def("set_device", [](int d) { Guard().setDevice({kEmu, (c10::DeviceIndex)d}); });
  m.def("device_count", [] { return g_devices; });
  m.def("synchronize", [](int d) {
    py::gil_scoped_release r;
    Guard().synchronizeDevice(d);
  });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("resize_storage", [](const Tensor& holder, int64_t n) {
    auto* s = holder.storage().unsafeGetStorageImpl();
    c10::impl::VirtualGuardImpl g(kEmu);
    auto old = g.exchangeDevice(holder.device());
    auto made = g_allocator.allocate(n);
    if (n && s->nbytes() && s->data())
      g_allocator.copy_data(made.get(), s->data(), std::min((size_t)n, (size_t)s->nbytes()));
    g.setDevice(old);
    s->set_data_ptr_noswap(std::move(made));
    s->set_nbytes(n);
  });
  m.def("counts", [] {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return g_counts;
  });
  m.def("reset_counts", [] {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    auto p = g_counts["pinned_bytes"];
    g_counts.clear();
    g_counts["pinned_bytes"] = p;
  });
  m.def("allocated", [](int d) {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return g_stats[d].allocated_bytes[0].current;
  });
  m.def("peak", [](int d) {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return g_stats[d].allocated_bytes[0].peak;
  });
  m.def("reset_peak", [](int d) {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    g_stats[d].allocated_bytes[0].reset_peak();
  });
  m.def("check_watches", [] {
    {
      std::lock_guard<std::recursive_mutex> h(g_lock);
      check_watches(nullptr);
    }
    flush_late();
  });
  m.def("set_callback", [](py::object f) {
    if (f.is_none())
      g_callback = nullptr;
    else
      g_callback = new py::object(f);
  });
  m.def("ccl", [](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<EmuCCL>(inner, rank, size));
  });
}

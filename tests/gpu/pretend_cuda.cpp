// The compiled part of pretend_cuda.py, which says what this is: a device guard, an allocator and
// one fallback for every operator, so that a CPU build of PyTorch has a device cuda:0.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/multinomial_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

using namespace c10;
using at::Tensor;
using torch::jit::Stack;

static const Device GPU(kCUDA, 0);

// ------------------------------------------------------------------------- guard and hooks

struct PretendGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() <= 0, "CUDA error: invalid device ordinal");
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, GPU); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = (void*)1;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
static PretendGuard guard;

static std::map<const char*, size_t> pinned;  // start and length
static std::mutex pinned_lock;
static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}
struct PinnedAllocator final : Allocator {  // memory like any other that is known to be pinned
  DataPtr allocate(size_t n) override {
    auto* held = new DataPtr(GetAllocator(kCPU)->allocate(n));
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned[static_cast<const char*>(held->get())] = n;
    return DataPtr(held->get(), held, &release, Device(kCPU));
  }
  static void release(void* p) {
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned.erase(static_cast<const char*>(static_cast<DataPtr*>(p)->get()));
    delete static_cast<DataPtr*>(p);
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
static PinnedAllocator pinned_allocator;

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return GPU; }
  void deviceSynchronize(DeviceIndex) const override {}
};
static void replace_hooks() {  // `import torch` has already asked for them, and keeps what it got
  static_assert(sizeof(CUDAHooks) == sizeof(CUDAHooksInterface));
  new (const_cast<CUDAHooksInterface*>(&detail::getCUDAHooks())) CUDAHooks(CUDAHooksArgs{});
}
}  // namespace at

// ------------------------------------------------------------------------- memory

static std::atomic<int64_t> allocated{0}, peak{0};
template <class Owner>
struct Counted {  // memory of the device, as long as it lives
  Owner owner;
  int64_t bytes;
  Counted(Owner owner, int64_t n) : owner(std::move(owner)), bytes(n) {
    const int64_t now = allocated += bytes;
    int64_t before = peak.load();
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
  }
  ~Counted() { allocated -= bytes; }
  static void free(void* p) { delete static_cast<Counted*>(p); }
};
struct PretendAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    auto* held = new Counted<DataPtr>(GetAllocator(kCPU)->allocate(n), n);
    return DataPtr(held->owner.get(), held, &Counted<DataPtr>::free, GPU);
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
static PretendAllocator allocator;

static Storage other_view(const Storage& held, bool cuda) {  // the same memory, kept alive
  auto* keep = new Counted<Storage>(held, cuda ? held.nbytes() : 0);
  DataPtr p(held.mutable_data(), keep, &Counted<Storage>::free, cuda ? GPU : Device(kCPU));
  Allocator* with = cuda ? &allocator : GetAllocator(kCPU);
  return Storage(Storage::use_byte_size_t(), held.nbytes(), std::move(p), with, true);
}
static Tensor make(Storage storage, bool cuda, const Tensor& like) {
  const DispatchKeySet keys(cuda ? DispatchKey::CUDA : DispatchKey::CPU);
  auto t = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, like.dtype());
  auto* self = t.unsafeGetTensorImpl();
  self->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) self->set_wrapped_number(true);
  return t;
}
static Tensor alias(const Tensor& t) { return make(other_view(t.storage(), false), false, t); }
static Tensor wrap(const Tensor& t) { return make(other_view(t.storage(), true), true, t); }

struct Held {  // one CPU view of each storage of a call, so that arguments that overlap still do
  std::vector<std::pair<Storage, Storage>> pairs;  // CUDA, CPU
  Tensor to_cpu(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (auto& [gpu, cpu] : pairs)
      if (gpu.is_alias_of(t.storage())) return make(cpu, false, t);
    pairs.emplace_back(t.storage(), other_view(t.storage(), false));
    return make(pairs.back().second, false, t);
  }
  Tensor to_gpu(const Tensor& t) const {
    if (!t.defined() || t.is_cuda()) return t;
    for (auto& [gpu, cpu] : pairs)
      if (cpu.is_alias_of(t.storage())) return make(gpu, true, t);
    return wrap(t);
  }
};

// ------------------------------------------------------------------------- checks and counts

static PyObject* note_function = nullptr;
static void note(const std::string& kind, const std::string& op) {
  py::gil_scoped_acquire gil;
  py::handle function(note_function);
  function(kind, op);
}

enum Check { EXACT, ITERATOR, INDEX, ANY };  // how CUDA's operator checks devices
struct About {
  int check = ITERATOR;
  int syncs = 0;
};
static std::unordered_map<std::string, About> about;
static const char* FAR = "Expected all tensors to be on the same device, but ";

template <class Look>
static void each_tensor(const IValue& value, Look look) {
  if (value.isTensor()) look(value.toTensor());
  if (value.isList())
    for (const IValue& one : value.toListRef())
      if (one.isTensor()) look(one.toTensor());
}

static void check_index(const Stack& args) {  // self, indices, values; an index may be on the CPU
  const auto self = args[0].toTensor().device();
  if (args.size() > 2 && args[2].isTensor()) {
    const auto values = args[2].toTensor();
    TORCH_CHECK(self == values.device() || values.dim() == 0, FAR, "found at least two devices, ",
                self, " and ", values.device());
  }
  each_tensor(args[1], [&](const Tensor& t) {
    TORCH_CHECK(!self.is_cpu() || !t.defined() || t.is_cpu(),
                "indices should be either on cpu or on the same device as the indexed tensor");
  });
}

static void check_devices(const FunctionSchema& schema, const Stack& args, int check) {
  std::optional<Device> common;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& name = schema.arguments()[i].name();
    if (args[i].isGenerator())
      TORCH_CHECK(args[i].toGenerator().device().is_cuda(), "Expected a 'cuda' generator");
    each_tensor(args[i], [&](const Tensor& t) {
      if (!t.defined()) return;
      if (!common) common = t.device();
      if (check == EXACT)
        TORCH_CHECK(*common == t.device(), FAR, "got ", name, " is on ", t.device(),
                    ", different from other tensors on ", *common,
                    " (argument of ", schema.name(), ")");
      if (check == ITERATOR)
        TORCH_CHECK(t.is_cuda() || t.dim() == 0, FAR, "found at least two devices, cuda:0 and ",
                    t.device(), "! (", schema.name(), ", ", name, ")");
    });
  }
  if (check == INDEX) check_index(args);
}

static void note_index_put(const std::string& name, const Stack& args) {
  // self, indices, values, accumulate. Reading by an index calls nonzero and copies by itself.
  bool mask = false;
  each_tensor(args[1], [&](const Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cpu() && t.dim() > 0) note("h2d", name + " with an index on the CPU");
    mask |= t.scalar_type() == kBool || t.scalar_type() == kByte;
  });
  const bool one_value = args[2].toTensor().numel() == 1 && !args[3].toBool();
  if (mask && !one_value) note("hidden", name + " with a mask");
}

static void note_cost(const std::string& name, const Stack& args, const About& what) {
  if (name == "aten::copy_") {
    const auto to = args[0].toTensor(), from = args[1].toTensor();
    if (from.is_cuda() != to.is_cuda() && from.numel()) {
      const auto& host = from.is_cuda() ? to : from;
      const bool free = args[2].toBool() && is_pinned(host.data_ptr());
      note(free ? "copy" : from.is_cuda() ? "d2h" : "h2d", name);
    }
  }
  if (name == "aten::_index_put_impl_") note_index_put(name, args);
  const bool item = name == "aten::_local_scalar_dense";
  for (int i = 0; i < what.syncs; ++i) note(item ? "d2h" : "hidden", name);
}

// ------------------------------------------------------------------------- the fallback

template <class Turn>
static IValue turned(const IValue& value, Turn turn) {
  if (value.isTensor()) return turn(value.toTensor());
  if (value.isTensorList()) {
    List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(turn(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t ? std::optional<Tensor>(turn(*t)) : std::nullopt);
    return out;
  }
  return value.isDevice() ? IValue(Device(kCPU)) : value;
}

static void update_shape(const Tensor& gpu, const Tensor& cpu) {  // after the kernel wrote to cpu
  auto storage = gpu.storage();
  const auto& written = cpu.storage();
  if (written.data() != storage.data() || written.nbytes() != storage.nbytes()) {  // resized
    storage.set_data_ptr_noswap(std::move(other_view(written, true).mutable_data_ptr()));
    storage.set_nbytes(written.nbytes());
  }
  if (cpu.sizes() != gpu.sizes() || cpu.strides() != gpu.strides())
    gpu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                     cpu.storage_offset());
}

static void fallback(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const auto& overload = schema.overload_name();
  const auto name = schema.name() + (overload.empty() ? "" : "." + overload);
  const auto found = about.find(name);
  const About what = found == about.end() ? About{} : found->second;
  const auto given = Stack(stack->begin() + first, stack->end());
  check_devices(schema, given, what.check);
  note_cost(name, given, what);

  Held held;  // the CPU kernel, on the same memory
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* info = arguments[i].alias_info();
    (*stack)[first + i] = turned(given[i], [&](const Tensor& t) {
      auto c = held.to_cpu(t);
      if (info && info->isWrite() && t.defined() && t.is_cuda()) written.emplace_back(t, c);
      return c;
    });
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    impl::ExcludeDispatchKeyGuard plain(autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  for (auto& [gpu, cpu] : written) update_shape(gpu, cpu);

  const auto& returns = schema.returns();
  const size_t base = stack->size() - returns.size();
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = (*stack)[base + r];
    const auto* info = returns[r].alias_info();
    if (!info || !info->isWrite()) {
      value = turned(value, [&](const Tensor& t) { return held.to_gpu(t); });
      continue;
    }
    for (size_t i = 0; i < given.size(); ++i) {  // an argument is returned as it was given
      const auto* from = arguments[i].alias_info();
      if (from && from->isWrite() && from->beforeSets() == info->beforeSets()) value = given[i];
    }
  }
}

// ------------------------------------------------------------------------- own operators

static Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                    std::optional<Device> d, std::optional<bool>,
                    std::optional<MemoryFormat> format) {
  TORCH_CHECK(!d || d->index() <= 0, "CUDA error: invalid device ordinal");
  const auto kind = dtype_or_default(dtype);
  return at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::CUDA), kind,
                                   format);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                            std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  const auto kind = dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           DispatchKeySet(DispatchKey::CUDA), kind);
}
static Tensor& set_storage(Tensor& t, Storage s, int64_t offset, IntArrayRef size,
                           IntArrayRef stride) {
  TORCH_CHECK(s.device() == t.device(), "Attempted to set the storage of a tensor on device \"",
              t.device(), "\" to a storage on different device \"", s.device(), "\".");
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(s));
  std::vector<int64_t> plain(size.size(), 1);
  for (int i = (int)size.size() - 2; i >= 0; --i)
    plain[i] = plain[i + 1] * std::max<int64_t>(size[i + 1], 1);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.size() ? stride : IntArrayRef(plain), offset);
  return t;
}
static Tensor& set_whole(Tensor& t, Storage s) {
  const int64_t n = s.nbytes() / t.dtype().itemsize();
  return set_storage(t, std::move(s), 0, {n}, {1});
}
static int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&,
                                const std::optional<Tensor>&, double, bool, std::optional<double>,
                                bool) {
  return 0;  // SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("multinomial", at::native::multinomial);
}

static std::unique_ptr<torch::Library> more;
static bool start(py::object function,
                  std::unordered_map<std::string, std::tuple<int, int>> table,
                  std::vector<std::string> kernels) {
  note_function = function.release().ptr();
  for (auto& [name, row] : table)
    about[name] = About{std::get<0>(row), std::get<1>(row)};
  at::replace_hooks();
  SetAllocator(kCUDA, &allocator, 1);
  impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  const auto aten = torch::Library::IMPL;
  more = std::make_unique<torch::Library>(aten, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto& name : kernels)
    more->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return at::globalContext().hasCUDA();
}

PYBIND11_MODULE(pretend_cuda_native, m) {
  m.def("start", &start);
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
  m.def("alias", &alias, "a CPU tensor that shares the memory of a CUDA one");
  m.def("wrap", &wrap, "a CUDA tensor that shares the memory of a CPU one");
}

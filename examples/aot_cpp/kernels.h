// A group's kernels: launch programs (fuser/kernel_spec.py) over the entries of libraries.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>

#include "archive.h"
#include "json.h"

using c10::IValue;

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"float32", at::kFloat},        {"float64", at::kDouble},     {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},    {"int64", at::kLong},         {"int32", at::kInt},
      {"int16", at::kShort},          {"int8", at::kChar},          {"uint8", at::kByte},
      {"bool", at::kBool},            {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble}};
  auto found = known.find(name.rfind("torch.", 0) == 0 ? name.substr(6) : name);
  if (found == known.end()) throw std::runtime_error("dtype " + name + " is not known to this loader");
  return found->second;
}

using Code = std::vector<int64_t>;  // a small stack program over slots: fuser/ir/sizes.py, run_program

inline Code code_of(const Json& json) {
  Code code;
  for (const Json& word : json.items) code.push_back(word.as_int());
  return code;
}

inline int64_t run(const Code& code, const std::vector<int64_t>& slots) {
  enum { push, slot, add, mul, floordiv, mod, min, max, eq, ne, lt, le };
  std::vector<int64_t> stack;
  for (size_t i = 0; i < code.size();) {
    if (code[i] == push || code[i] == slot) {
      stack.push_back(code[i] == push ? code.at(i + 1) : slots.at((size_t)code.at(i + 1)));
      i += 2;
      continue;
    }
    if (stack.size() < 2) throw std::runtime_error("a launch program's code is none");
    int64_t b = stack.back();
    stack.pop_back();
    int64_t a = stack.back(), q = b ? a / b - (a % b && (a ^ b) < 0) : 0;
    switch (code[i++]) {
      case add: a += b; break;
      case mul: a *= b; break;
      case floordiv: a = q; break;
      case mod: a = b ? a - q * b : 0; break;
      case min: a = a < b ? a : b; break;
      case max: a = a > b ? a : b; break;
      case eq: a = a == b; break;
      case ne: a = a != b; break;
      case lt: a = a < b; break;
      case le: a = a <= b; break;
      default: throw std::runtime_error("a launch program's code is none");
    }
    stack.back() = a;
  }
  if (stack.size() != 1) throw std::runtime_error("a launch program's code is none");
  return stack[0];
}

// body(thread, threads) in each of `threads` threads of torch's own OpenMP runtime.
inline void in_threads(int threads, const std::function<void(int, int)>& body) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static auto parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  static auto number = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_thread_num");
  static auto count = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_num_threads");
  if (threads < 2 || !parallel || !number || !count) return body(0, 1);
  parallel([](void* f) { (*(const std::function<void(int, int)>*)f)(number(), count()); }, (void*)&body,
           (unsigned)threads, 0);
}

class Kernel {
 public:
  Kernel(const Json& json, const Archive& file) {
    const Json& p = json.at("program");
    for (const Json& i : p.at(0).items) inputs_.push_back(input(i));
    n_slots_ = (size_t)p.at(1).as_int();
    n_floats_ = (size_t)p.at(2).as_int();
    for (const Json& g : p.at(3).items) guards_.push_back(code_of(g));
    for (const Json& b : p.at(4).items) {
      buffers_.push_back({dtype_of(b.at(0).as_text()), codes(b.at(1)), codes(b.at(2)), b.at(3).flag});
    }
    load(file, json.at("library").as_text());
    for (const Json& s : p.at(5).items) {
      auto entry = (Entry)dlsym(library_, s.at(0).as_text().c_str());
      if (!entry) throw std::runtime_error(std::string("a kernel has no entry: ") + dlerror());
      steps_.push_back({entry, code_of(s.at(1)), code_of(s.at(2)), code_of(s.at(3))});
    }
    for (const Json& o : p.at(6).items) outputs_.push_back({o.at(0).as_text() == "input", (size_t)o.at(1).as_int()});
    single_ = p.at(7).flag;
  }

  // The result if this kernel takes the arguments; false if it does not, or reports that eager must raise.
  bool operator()(const std::vector<IValue>& args, IValue* result) const {
    std::vector<int64_t> slots(n_slots_);
    std::vector<double> floats(n_floats_ ? n_floats_ : 1);
    if (!match(args, slots, floats)) return false;
    std::vector<at::Tensor> made;
    std::vector<char*> pointers;
    for (const IValue& a : args) {
      if (a.isTensor()) pointers.push_back((char*)a.toTensor().data_ptr());
    }
    for (const Buffer& b : buffers_) {
      auto sizes = run_all(b.sizes, slots);
      if (b.output) {
        made.push_back(at::empty_strided(sizes, run_all(b.strides, slots), at::TensorOptions(b.dtype)));
      } else {
        int64_t n = 1;
        for (int64_t s : sizes) n *= s;
        made.push_back(at::empty({n}, at::TensorOptions(b.dtype)));  // at 64 bytes, as all memory of torch
      }
      pointers.push_back((char*)made.back().data_ptr());
    }
    for (const Step& s : steps_) {
      if (run_step(s, pointers, slots, floats)) return false;
    }
    std::vector<IValue> results;
    for (auto& [from_input, i] : outputs_) results.push_back(from_input ? args.at(i) : IValue(made.at(i)));
    *result = single_ ? results.at(0) : IValue(c10::ivalue::Tuple::create(results));
    return true;
  }

 private:
  using Entry = void (*)(char* const*, const int64_t*, const double*, int64_t, int64_t, char*, int32_t*);
  struct Item {
    int64_t slot;  // to bind; -1: the number must be what `check` gives
    Code check;
  };
  struct Input {
    std::string kind;
    at::ScalarType dtype;
    std::vector<Item> sizes, strides;
    int64_t slot;
    bool aligned;
  };
  struct Buffer {
    at::ScalarType dtype;
    std::vector<Code> sizes, strides;
    bool output;
  };
  struct Step {
    Entry entry;
    Code units, work, scratch;
  };
  std::vector<Input> inputs_;
  size_t n_slots_, n_floats_;
  std::vector<Code> guards_;
  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  std::vector<std::pair<bool, size_t>> outputs_;
  bool single_;
  void* library_ = nullptr;

  static std::vector<Code> codes(const Json& json) {
    std::vector<Code> out;
    for (const Json& c : json.items) out.push_back(code_of(c));
    return out;
  }
  static std::vector<Item> items(const Json& json) {
    std::vector<Item> out;
    for (const Json& i : json.items) out.push_back(i.is(Json::integer) ? Item{i.whole, {}} : Item{-1, code_of(i)});
    return out;
  }
  static Input input(const Json& i) {
    auto dtype = i.at(1).is(Json::string) ? dtype_of(i.at(1).text) : at::kFloat;
    return {i.at(0).as_text(), dtype, items(i.at(3)), items(i.at(4)), i.at(5).as_int(), i.at(6).flag};
  }
  static std::vector<int64_t> run_all(const std::vector<Code>& codes, const std::vector<int64_t>& slots) {
    std::vector<int64_t> out;
    for (const Code& c : codes) out.push_back(run(c, slots));
    return out;
  }

  // Libraries are loaded from memory, so that no folder is needed.
  void load(const Archive& file, const std::string& name) {
    std::string data = file.read(name);
    int handle = memfd_create("fuser-kernel", MFD_CLOEXEC);
    if (handle < 0 || write(handle, data.data(), data.size()) != (ssize_t)data.size()) file.refuse("no memory");
    library_ = dlopen(("/proc/self/fd/" + std::to_string(handle)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) file.refuse(std::string("a kernel cannot be loaded: ") + dlerror());
  }

  static bool take(int64_t number, const Item& item, bool needed, std::vector<int64_t>& slots) {
    if (item.slot >= 0) slots.at((size_t)item.slot) = number;
    else if (needed && run(item.check, slots) != number) return false;
    return true;
  }

  bool match(const std::vector<IValue>& args, std::vector<int64_t>& slots, std::vector<double>& floats) const {
    if (args.size() != inputs_.size()) return false;
    for (size_t n = 0; n < args.size(); n++) {
      const Input& want = inputs_[n];
      const IValue& a = args[n];
      if (want.kind == "tensor") {
        if (!a.isTensor() || !match_tensor(a.toTensor(), want, slots)) return false;
      } else if (want.kind == "float") {
        if (!a.isDouble() && !a.isInt()) return false;
        floats.at((size_t)want.slot) = a.isDouble() ? a.toDouble() : (double)a.toInt();
      } else {
        if (want.kind == "int" ? !a.isInt() : !a.isBool()) return false;
        slots.at((size_t)want.slot) = a.isInt() ? a.toInt() : a.toBool();
      }
    }
    for (const Code& g : guards_) {
      if (!run(g, slots)) return false;
    }
    return true;
  }

  static bool match_tensor(const at::Tensor& t, const Input& want, std::vector<int64_t>& slots) {
    size_t rank = want.sizes.size();
    if (t.scalar_type() != want.dtype || !t.is_cpu() || (size_t)t.dim() != rank || t.is_conj() || t.is_neg()) return false;
    if (want.aligned && (uintptr_t)t.data_ptr() % 16) return false;
    for (size_t d = 0; d < rank; d++) {
      if (!take(t.size((int64_t)d), want.sizes[d], true, slots)) return false;
    }
    for (size_t d = 0; d < rank; d++) {
      bool needed = t.numel() > 0 && t.size((int64_t)d) > 1;
      if (!take(t.stride((int64_t)d), want.strides[d], needed, slots)) return false;
    }
    return true;
  }

  // Whether the step reports a status: an index out of range, for which the group's own calls raise eager's error.
  static bool run_step(const Step& s, const std::vector<char*>& pointers, const std::vector<int64_t>& slots,
                       const std::vector<double>& floats) {
    int64_t units = run(s.units, slots), work = run(s.work, slots), scratch = run(s.scratch, slots);
    if (units <= 0) return false;
    int64_t threads = std::min<int64_t>({at::get_num_threads(), work / 32768, units});
    std::atomic<int32_t> status{0};
    in_threads(at::in_parallel_region() ? 1 : (int)threads, [&](int i, int n) {
      int64_t share = units / n, rest = units % n, begin = i * share + std::min<int64_t>(i, rest);
      int64_t end = begin + share + (i < rest);
      char* own = scratch ? (char*)std::aligned_alloc(64, (size_t)((scratch + 127) / 64 * 64)) : nullptr;
      int32_t found = 0;
      if (begin < end) s.entry(pointers.data(), slots.data(), floats.data(), begin, end, own, &found);
      std::free(own);
      if (found) status = found;
    });
    return status != 0;
  }
};

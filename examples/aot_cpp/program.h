// An ahead-of-time file of fuser, loaded and run with libtorch: no Python, no compiler. See docs/ahead_of_time.md.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>

#include <cmath>

#include "kernels.h"

class Group;

// A graph as rows: calls of operators, of groups, and of Python's operators on numbers.
class Rows {
 public:
  Rows(const Json& graph, size_t n_bound, const std::vector<std::unique_ptr<Group>>& groups)
      : graph_(graph), n_bound_(n_bound), groups_(groups) {
    last_.assign(graph.at("rows").items.size(), 0);
    size_t n = 0;
    for (const Json& row : graph.at("rows").items) {
      Operator found;
      const std::string& kind = row.at(0).as_text();
      if (kind == "call") found = find(row.at(1).as_text());
      operators_.push_back(found);
      for (size_t i = 2; i < row.items.size() && kind != "input" && kind != "bound"; i++) note(row.items[i], n);
      n++;
    }
    note(graph.at("output"), n);
    for (size_t i = 0; i < last_.size(); i++) {
      if (dead_.size() <= last_[i]) dead_.resize(last_[i] + 1);
      dead_[last_[i]].push_back(i);
    }
    dead_.resize(n + 1);
  }

  IValue operator()(const std::vector<IValue>& args) const;

 private:
  struct Operator {
    std::optional<c10::OperatorHandle> handle;
  };
  const Json& graph_;
  size_t n_bound_;
  const std::vector<std::unique_ptr<Group>>& groups_;
  std::vector<Operator> operators_;
  std::vector<size_t> last_;               // for each row, the last one that reads it
  std::vector<std::vector<size_t>> dead_;  // rows whose values go away after this one

  static Operator find(const std::string& name) {
    size_t colon = name.find("::");
    if (colon == std::string::npos) return {};  // Python on numbers
    size_t dot = name.find('.', colon);
    std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    return {c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(),
                                                           overload == "default" ? "" : overload.c_str())};
  }

  void note(const Json& value, size_t n) {
    if (value.has("ref")) last_.at((size_t)value.at("ref").as_int()) = n;
    for (const Json& v : value.items) note(v, n);
    for (auto& [name, v] : value.members) note(v, n);
  }

  // A value of the JSON; `type` says what the operator's schema expects, if there is one.
  static IValue value(const Json& j, const c10::Type* type, const std::vector<IValue>& values, int32_t repeat = 1) {
    while (type && type->kind() == c10::TypeKind::OptionalType) {
      if (j.is(Json::null)) return IValue();
      type = type->castRaw<c10::OptionalType>()->getElementType().get();
    }
    bool list = type && type->kind() == c10::TypeKind::ListType;
    if (j.has("ref")) {
      IValue found = values.at((size_t)j.at("ref").as_int());
      if (type && type->kind() == c10::TypeKind::FloatType && found.isInt()) return (double)found.toInt();
      if (!list || !(found.isInt() || found.isTuple())) return found;
      auto element = type->castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList made(element);
      if (found.isTuple()) for (const IValue& v : found.toTupleRef().elements()) made.push_back(v);
      else for (int32_t i = 0; i < repeat; i++) made.push_back(found);
      return made;
    }
    bool items = j.is(Json::array) || j.has("tuple");
    if (items || list) {
      const std::vector<Json>& given = j.has("tuple") ? j.at("tuple").items : j.items;
      if (!list) {
        std::vector<IValue> made;
        for (const Json& v : given) made.push_back(value(v, nullptr, values));
        return c10::ivalue::Tuple::create(made);
      }
      auto element = type->castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList made(element);
      for (const Json& v : given) made.push_back(value(v, element.get(), values));
      for (int32_t i = 0; i < repeat && !items; i++) made.push_back(value(j, element.get(), values));
      return made;
    }
    switch (j.kind) {
      case Json::null: return IValue();
      case Json::boolean: return j.flag;
      case Json::integer: return type && type->kind() == c10::TypeKind::FloatType ? IValue((double)j.whole) : j.whole;
      case Json::real: return j.number;
      case Json::string: return j.text;
      default: return spelled(j);
    }
  }

  static IValue spelled(const Json& j) {
    if (j.has("dtype")) return (int64_t)dtype_of(j.at("dtype").as_text());
    if (j.has("float")) return std::strtod(j.at("float").as_text().c_str(), nullptr);
    if (j.has("device")) return c10::Device(j.at("device").as_text());
    if (j.has("layout") && j.at("layout").as_text() == "strided") return (int64_t)c10::Layout::Strided;
    if (j.has("memory_format")) {
      static const std::map<std::string, c10::MemoryFormat> known = {
          {"contiguous_format", c10::MemoryFormat::Contiguous}, {"preserve_format", c10::MemoryFormat::Preserve},
          {"channels_last", c10::MemoryFormat::ChannelsLast}, {"channels_last_3d", c10::MemoryFormat::ChannelsLast3d}};
      return (int64_t)known.at(j.at("memory_format").as_text());
    }
    throw std::runtime_error("program.json holds a value that this loader does not know");
  }

  static IValue call(const c10::OperatorHandle& op, const Json& args, const Json& kwargs, const std::vector<IValue>& v) {
    const auto& schema = op.schema();
    torch::jit::Stack stack;
    const std::vector<Json>& given = args.at("tuple").items;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const c10::Argument& want = schema.arguments()[i];
      const Json* found = i < given.size() ? &given[i] : nullptr;
      for (const Json& pair : kwargs.at("dict").items) {
        if (pair.at(0).as_text() == want.name()) found = &pair.at(1);
      }
      if (found) stack.push_back(value(*found, want.type().get(), v, want.N().value_or(1)));
      else if (want.default_value()) stack.push_back(*want.default_value());
      else throw std::runtime_error(schema.name() + " lacks its argument " + want.name());
    }
    op.callBoxed(stack);
    if (stack.size() == 1) return stack[0];
    return c10::ivalue::Tuple::create(std::vector<IValue>(stack.begin(), stack.end()));
  }

  // Python's operators on numbers, and items of tuples and lists.
  static IValue python(const std::string& name, const std::vector<IValue>& a) {
    std::string op = name.substr(name.find(':') + 1);
    if (op == "getitem") {
      int64_t i = a.at(1).toInt();
      if (a[0].isTuple()) return a[0].toTupleRef().elements().at((size_t)i);
      return a[0].toListRef().at((size_t)i);
    }
    if (op == "product" || op == "sized_product") return at::mm(a.at(0).toTensor(), a.at(1).toTensor());
    bool whole = a.at(0).isInt() && (a.size() < 2 || a[1].isInt());
    auto number = [](const IValue& v) { return v.isInt() ? (double)v.toInt() : v.isBool() ? v.toBool() : v.toDouble(); };
    double x = number(a[0]), y = a.size() > 1 ? number(a[1]) : 0;
    int64_t n = whole ? a[0].toInt() : 0, m = whole && a.size() > 1 ? a[1].toInt() : 0;
    if (op == "eq") return x == y;
    if (op == "ne") return x != y;
    if (op == "lt") return x < y;
    if (op == "le") return x <= y;
    if (op == "gt") return x > y;
    if (op == "ge") return x >= y;
    if (op == "truediv") return x / y;
    if (op == "sym_float") return x;
    if (op == "sym_int") return (int64_t)x;
    if (op == "sym_max") return whole ? IValue(std::max(n, m)) : IValue(std::max(x, y));
    if (op == "sym_min") return whole ? IValue(std::min(n, m)) : IValue(std::min(x, y));
    if (op == "neg") return whole ? IValue(-n) : IValue(-x);
    if (op == "add") return whole ? IValue(n + m) : IValue(x + y);
    if (op == "sub") return whole ? IValue(n - m) : IValue(x - y);
    if (op == "mul") return whole ? IValue(n * m) : IValue(x * y);
    if (op == "floordiv" && whole && m) return n / m - (n % m && (n ^ m) < 0);
    if (op == "mod" && whole && m) return n - m * (n / m - (n % m && (n ^ m) < 0));
    if (op == "floordiv") return std::floor(x / y);
    if (op == "pow" && !whole) return std::pow(x, y);
    throw std::runtime_error(name + " is not known to this loader");
  }
};

// A group: its first kernel that takes the arguments, else its own calls.
class Group {
 public:
  Group(const Json& json, const Archive& file, const std::vector<std::unique_ptr<Group>>& none)
      : by_aten_(json.at("graph"), (size_t)json.at("bound").as_int(), none) {
    for (const Json& k : json.at("kernels").items) kernels_.emplace_back(k, file);
  }
  IValue operator()(const std::vector<IValue>& args) const {
    IValue result;
    for (const Kernel& k : kernels_) {
      if (k(args, &result)) {
        hits++;
        return result;
      }
    }
    misses++;
    return by_aten_(args);
  }
  mutable std::atomic<int64_t> hits{0}, misses{0};

 private:
  Rows by_aten_;
  std::vector<Kernel> kernels_;
};

inline IValue Rows::operator()(const std::vector<IValue>& args) const {
  const std::vector<Json>& rows = graph_.at("rows").items;
  std::vector<IValue> values(rows.size());
  size_t next = n_bound_;
  for (size_t n = 0; n < rows.size(); n++) {
    const Json& row = rows[n];
    const std::string& kind = row.at(0).as_text();
    if (kind == "input") values[n] = args.at(next++);
    else if (kind == "bound") values[n] = args.at((size_t)row.at(1).as_int());
    else if (kind == "constant") values[n] = value(row.at(1), nullptr, values);
    else if (operators_[n].handle) values[n] = call(*operators_[n].handle, row.at(2), row.at(3), values);
    else {
      std::vector<IValue> given;
      for (const Json& a : row.at(2).at("tuple").items) given.push_back(value(a, nullptr, values));
      if (kind == "group") values[n] = (*groups_.at((size_t)row.at(1).as_int()))(given);
      else if (kind == "call") values[n] = python(row.at(1).as_text(), given);
      else throw std::runtime_error("a row of the kind " + kind + " is not known to this loader");
    }
    for (size_t i : dead_[n]) values[i] = IValue();
  }
  return value(graph_.at("output"), nullptr, values);
}

class Program {
 public:
  // std::runtime_error (or c10::Error) says why a file is not used.
  explicit Program(const std::string& path) : file_(path), json_(JsonReader(file_.read("program.json")).read()) {
    if (json_.at("machine").at("format").as_int() != 1) file_.refuse("it has another version of the format");
    if (json_.at("machine").at("torch").as_text() != TORCH_VERSION_TEXT) {
      file_.refuse("it was written for torch " + json_.at("machine").at("torch").as_text() + ", here is " TORCH_VERSION_TEXT);
    }
    check_instructions();
    map_tensors();
    for (const Json& g : json_.at("groups").items) groups_.push_back(std::make_unique<Group>(g, file_, groups_));
    rows_ = std::make_unique<Rows>(json_.at("graph"), 0, groups_);
  }

  // The program's results, flat, for its flat inputs: containers are Python's.
  std::vector<IValue> operator()(const std::vector<IValue>& leaves) {
    at::NoGradGuard no_grad;
    check(leaves);
    std::vector<IValue> args(held_);
    args.insert(args.end(), leaves.begin(), leaves.end());
    IValue returned = (*rows_)(args);
    auto& results = returned.toTupleRef().elements();
    for (const Json& w : json_.at("writes").items) {
      const IValue& into = w.at(1).flag ? held_.at((size_t)w.at(2).as_int()) : leaves.at((size_t)w.at(2).as_int());
      into.toTensor().copy_(results.at((size_t)w.at(0).as_int()).toTensor());
    }
    return std::vector<IValue>(results.begin() + json_.at("skipped").as_int(), results.end());
  }

  int64_t kernel_hits() const { return sum(&Group::hits); }
  int64_t kernel_misses() const { return sum(&Group::misses); }

 private:
  Archive file_;
  Json json_;
  std::vector<IValue> held_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unique_ptr<Rows> rows_;

  template <class Counter>
  int64_t sum(Counter counter) const {
    int64_t n = 0;
    for (auto& g : groups_) n += ((*g).*counter).load();
    return n;
  }

  void check_instructions() {
    FILE* info = fopen("/proc/cpuinfo", "r");
    std::string words = " ";
    char line[1 << 16];
    while (info && fgets(line, sizeof line, info)) {
      if (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8)) {
        words += strchr(line, ':') + 1;
        break;
      }
    }
    if (info) fclose(info);
    for (char& c : words) c = c == '\n' ? ' ' : c;
    for (const Json& name : json_.at("machine").at("instructions").items) {
      if (words.find(" " + name.as_text() + " ") == std::string::npos) {
        file_.refuse("its kernels need " + name.as_text() + ", which this processor lacks");
      }
    }
  }

  void map_tensors() {
    const Archive::Member& m = file_.member("tensors");
    std::string sums = file_.read("sums");
    if (sums.size() != m.size / 4096 * 8) file_.refuse("its sums are damaged");
    for (size_t page = 0; page < m.size / 4096; page++) {
      uint64_t sum = 0, want, word;
      for (size_t i = 0; i < 512; i++) {
        memcpy(&word, file_.at(m) + page * 4096 + i * 8, 8);
        sum += word;
      }
      memcpy(&want, sums.data() + page * 8, 8);
      if (sum != want) file_.refuse("its tensors are damaged");
    }
    std::vector<at::Tensor> tensors;
    for (const Json& t : json_.at("tensors").items) {
      auto dtype = dtype_of(t.at(0).as_text());
      if (t.items.size() > 5) file_.refuse("it is for a GPU, which this loader does not know");
      int64_t offset = t.at(3).as_int(), bytes = t.at(4).as_int() * (int64_t)c10::elementSize(dtype);
      if (offset < 0 || bytes < 0 || (size_t)(offset + bytes) > m.size) file_.refuse("a tensor reaches outside");
      tensors.push_back(at::from_blob(file_.at(m) + offset, code_of(t.at(1)), code_of(t.at(2)), at::TensorOptions(dtype)));
    }
    for (const Json& n : json_.at("held").items) held_.push_back(tensors.at((size_t)n.as_int()));
  }

  void check(const std::vector<IValue>& leaves) const {
    const std::vector<Json>& wanted = json_.at("inputs").items;
    if (leaves.size() != wanted.size()) throw std::runtime_error(std::to_string(wanted.size()) + " inputs are expected");
    std::map<std::string, int64_t> symbols;
    for (size_t n = 0; n < wanted.size(); n++) {
      if (wanted[n].at("kind").as_text() != "tensor") continue;
      const std::string what = "input " + wanted[n].at("name").as_text();
      const std::vector<Json>& sizes = wanted[n].at("sizes").items;
      if (!leaves[n].isTensor() || (size_t)leaves[n].toTensor().dim() != sizes.size()) {
        throw std::runtime_error(what + " is no tensor of " + std::to_string(sizes.size()) + " dims");
      }
      const at::Tensor& t = leaves[n].toTensor();
      if (t.scalar_type() != dtype_of(wanted[n].at("dtype").at("dtype").as_text()) || !t.is_cpu()) {
        throw std::runtime_error(what + " has another dtype or device than the program was exported for");
      }
      for (size_t d = 0; d < sizes.size(); d++) check_size(t.size((int64_t)d), sizes[d], what, symbols);
    }
    for (const Json& guard : json_.at("guards").items) {
      std::vector<int64_t> slots;
      for (const Json& name : guard.at(1).items) {
        if (symbols.count(name.as_text())) slots.push_back(symbols[name.as_text()]);
      }
      if (slots.size() == guard.at(1).items.size() && !::run(code_of(guard.at(2)), slots)) {
        throw std::runtime_error("the export requires " + guard.at(0).as_text() + " of its sizes");
      }
    }
  }

  void check_size(int64_t n, const Json& want, const std::string& what, std::map<std::string, int64_t>& symbols) const {
    bool right = !want.is(Json::integer) || want.whole == n;
    if (want.is(Json::string)) {
      right = symbols.emplace(want.text, n).first->second == n;
      const Json& range = json_.at("ranges").at(want.text);
      right = right && !(range.at(0).is(Json::integer) && n < range.at(0).whole);
      right = right && !(range.at(1).is(Json::integer) && n > range.at(1).whole);
    }
    if (!right) throw std::runtime_error(what + " has a size of " + std::to_string(n) + ", which the export does not allow");
  }
};
